"""Protocols of other services, each in a folder that can be removed with its lines in `served` and `chore_parts`."""
