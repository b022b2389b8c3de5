"""Input images of jobs: fetched, validated, stored."""
