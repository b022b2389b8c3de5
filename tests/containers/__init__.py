"""The images and the compose file on a container engine: `make containers`."""
