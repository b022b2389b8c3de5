"""Request and response bodies of each protocol as jobs, without HTTP."""
