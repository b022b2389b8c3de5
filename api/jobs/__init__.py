"""From the body of a request to a job, and from the job's record to the response."""
