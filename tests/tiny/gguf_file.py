"""A denoiser's weights as a GGUF file."""

from __future__ import annotations

from pathlib import Path

import torch

BLOCK = 32  # weights that share a scale


def save(module: torch.nn.Module, file: Path) -> Path:
    """Write the weights of `module`; matrices with rows of whole blocks have 8 bits, all other tensors 32."""
    import gguf

    writer = gguf.GGUFWriter(file, "tiny")
    q8 = gguf.GGMLQuantizationType.Q8_0
    for name, tensor in module.state_dict().items():
        values = tensor.float().numpy()
        if values.ndim == 2 and values.shape[1] % BLOCK == 0:
            writer.add_tensor(name, gguf.quants.quantize(values, q8), raw_dtype=q8)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
