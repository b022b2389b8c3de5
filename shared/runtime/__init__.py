"""Process basics: clock, logging, metrics, cancellation, JSON, the version."""
