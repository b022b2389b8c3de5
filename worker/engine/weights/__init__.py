"""The weights of a model: their files, formats and size in memory, and why a load fails."""
