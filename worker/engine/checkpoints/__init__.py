"""Checkpoints of image tasks: the state after a step, from which another engine continues the image."""
