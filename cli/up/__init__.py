"""`fusequeue up`: Redis, API, workers and chores on this machine."""
