"""fal's queue protocol."""
