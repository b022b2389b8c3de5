"""The stand-in of one module of a model for its pipelines, with the shared methods behind it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shared.config.model_spec import ModelSpec
from shared.signature import DENOISERS
from worker.engine.fusion.module_proxy import ModuleProxy, SharedMethod, shared_methods_of
from worker.engine.pipelines.clones import cache_signatures, install_capturing_hooks
from worker.engine.pipelines.compiling import check_blocks
from worker.engine.weights.attention import use_attention


def stand_in_for(
    name: str, module: torch.nn.Module, spec: ModelSpec, device: torch.device, cast: torch.dtype | None = None
) -> tuple[ModuleProxy, Mapping[str, SharedMethod]]:
    """Prepare a module for image tasks, in the dtype `cast` if there is one; return its stand-in and shared methods."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    install_capturing_hooks(module)
    if not spec.compile:
        cache_signatures(module)
    if spec.compile == "blocks" and name in DENOISERS:
        check_blocks(module, spec)
    module_dtype: torch.dtype = getattr(module, "dtype", dtype)
    if cast is not None:
        module.to(cast)
    # Offloading and casting swap weights inside forwards; weights swapped in inference mode stay in it.
    lean = spec.offload == "none" and (spec.layerwise_casting is None or name not in DENOISERS)
    pads = spec.attention is None or name not in DENOISERS or use_attention(module, spec.attention, device, dtype)
    # diffusers joins the ranks' parts of a mask wrongly if they differ in length, which two ranks' order hides.
    pads = pads and spec.devices <= 2
    methods = shared_methods_of(name, module, cast=cast, lean=lean, device=device, pads=pads)
    return ModuleProxy(module, methods, device, module_dtype), methods
