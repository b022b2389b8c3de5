"""The demo: a diffusion model of a few megabytes that draws one shape on a plain ground, its training, and a load."""
