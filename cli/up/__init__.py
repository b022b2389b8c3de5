"""`fusequeue up`: every part of fusequeue on this machine."""
