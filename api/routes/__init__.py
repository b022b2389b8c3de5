"""The paths of the API, one resource a file."""
