"""The demo model: a diffusion pipeline of a few megabytes that draws one shape on a ground, and its training."""
