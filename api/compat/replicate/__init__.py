"""Replicate's protocol, below `/compat/replicate`: jobs as predictions, for its SDKs as they are."""
