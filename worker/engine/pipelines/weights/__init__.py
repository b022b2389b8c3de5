"""The weights and kernels of a pipeline: quantized weights, their size in memory, attention backends, compiled code."""
