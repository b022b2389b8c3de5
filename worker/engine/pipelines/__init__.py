"""Diffusers pipelines: loading, cloning, and calling them for a job."""
