"""A simulated fleet of workers with cold starts, scaled by two policies."""
