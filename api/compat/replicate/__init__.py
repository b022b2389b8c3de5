"""Replicate's protocol for its unmodified SDKs: jobs as predictions."""
