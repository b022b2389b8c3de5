"""A long run with real processes: what it uses returns to where it was."""
