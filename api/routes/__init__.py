"""The paths of the API, one resource per file."""
