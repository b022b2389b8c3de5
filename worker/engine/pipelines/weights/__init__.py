"""The weights of a pipeline: their size in memory, and quantized ones."""
