"""Diffusers pipelines: loading, caching, cloning, and calling them for a job."""
