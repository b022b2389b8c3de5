"""Replicate requests as job requests, and jobs as predictions. Pure functions."""
