"""One model over several devices: rank processes, and diffusers' context parallelism in them."""
