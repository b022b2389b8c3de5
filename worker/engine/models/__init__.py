"""The models in memory: loading in the background, eviction, operators' orders, and adapters."""
