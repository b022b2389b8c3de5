"""A simulated fleet of workers with cold starts, scaled as the product does."""
