"""What checks and warms up models before they serve, by sample jobs, and whether they fit on the device."""
