"""Replicate's protocol: jobs as predictions."""
