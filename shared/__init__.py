"""The contract between the API and the workers: what a job is, where it waits, where its images go."""
