"""Stacking rules of the known architectures, as plain data."""
