"""Input images of jobs: fetching, validation and storage."""
