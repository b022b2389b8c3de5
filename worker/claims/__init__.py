"""Claims: when and what a worker claims, a claimed job, and the leases that keep it."""
