"""Connections to Redis: pools, failover, the connection that callers share, their errors, and what the queue needs."""
