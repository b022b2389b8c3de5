"""Attention backends: diffusers' kernels by name, for the denoisers of one model."""

from typing import Any

import torch
from diffusers.models import attention_dispatch

BACKENDS: dict[str, Any] = {backend.value: backend for backend in attention_dispatch.AttentionBackendName}
_KEYS = 32


def use_attention(module: torch.nn.Module, name: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Make a denoiser's attention layers use the backend `name`; return whether that one takes masks.

    Raises `ValueError` if the backend does not run here, or the denoiser takes none.
    """
    # The denoiser's own `set_attention_backend` also makes it the default of the process, so of other models.
    layers: list[Any] = [getattr(layer, "processor", None) for layer in module.modules()]
    processors = [processor for processor in layers if hasattr(processor, "_attention_backend")]
    if not processors:
        raise ValueError(f"attention: the layers of {type(module).__name__} take no backend; remove the key")
    if (fault := fault_of(name, device, dtype)) is not None:
        available = ", ".join(available_backends(device, dtype))
        raise ValueError(f'attention = "{name}" does not run here: {fault}; available: {available}')
    for processor in processors:
        processor._attention_backend = BACKENDS[name]
    return fault_of(name, device, dtype, masked=True) is None


def available_backends(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Return the names of the backends that run on `device`."""
    return [name for name in BACKENDS if fault_of(name, device, dtype) is None]


def fault_of(name: str, device: torch.device, dtype: torch.dtype, *, masked: bool = False) -> str | None:
    """Return why a small attention with a backend fails or is wrong, None if it is right.

    Each value is its position, so that the result shows which keys count: all, or with `masked` the first half.
    """
    if name not in BACKENDS:
        return "diffusers has no such backend"
    if name.endswith("_hub"):
        return "workers run no code from the hub"
    counted = _KEYS // 2 if masked else _KEYS
    with torch.device(device):
        queries = torch.zeros(1, _KEYS, 2, 64, dtype=dtype)
        values = torch.arange(_KEYS, dtype=dtype).reshape(1, _KEYS, 1, 1).expand(queries.shape).contiguous()
        mask = (torch.arange(_KEYS) < counted)[None, None, None] if masked else None
    try:
        attention_dispatch._check_attention_backend_requirements(BACKENDS[name])
        output = attention_dispatch.dispatch_attention_fn(
            queries, queries, values, attn_mask=mask, backend=BACKENDS[name]
        )
        off = (output.float() - (counted - 1) / 2).abs().max().item()
    except Exception as error:  # of kernels and compilers, which share no base class
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return None if off < 1.0 else f"its result is off by {off:.1f}"
