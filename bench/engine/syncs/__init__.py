"""How often the host waits for the device between two denoiser forwards, and what it queues there."""
