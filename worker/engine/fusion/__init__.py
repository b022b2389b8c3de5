"""Calls of several image tasks as one fused forward: proxies, batch keys, stacking."""
