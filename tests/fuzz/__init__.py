"""Random requests, bytes, images and files, from a seed, against a real stack."""
