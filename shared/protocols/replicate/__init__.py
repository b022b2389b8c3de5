"""Replicate's protocol, as far as it is about words: nothing here waits for anything."""
