"""`fusequeue pool`: as many workers on this machine as the service wants."""
