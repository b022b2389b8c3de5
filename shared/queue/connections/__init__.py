"""Connections to Redis: those that follow a failover, and the one that callers share."""
