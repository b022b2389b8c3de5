"""`make clients`: the real clients of the service's protocols, from their registries, against `fusequeue up`."""
