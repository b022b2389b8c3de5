"""Compiled denoisers: whole, or by their repeated blocks."""

from functools import partial
from typing import Any

import torch
from torch.fx.experimental import _config as shapes_config

from shared.config.model_spec import ModelSpec
from worker.engine.fusion.module_proxy import SharedMethod
from worker.engine.lora.per_row import RowAdapters

COMPILER: Any = "inductor"
# For blocks for which no graph fits: a compilation would hold up all jobs for many seconds.
AFTER_WARM_UP = "eager_on_recompile"
# Of all blocks in the process: each width of a UNet has graphs, for one row and for several, and with adapters.
_MOST_GRAPHS = 64
CONVOLUTIONS = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)


def check_blocks(module: Any, spec: ModelSpec) -> None:
    """Raise `ValueError` if diffusers names no repeated blocks of a denoiser, or adapters would miss some layers."""
    name = type(module).__name__
    if not getattr(module, "_repeated_blocks", None):
        raise ValueError(f'compile = "blocks": {name} names no repeated blocks; use compile = true')
    if spec.adapter and any(isinstance(layer, CONVOLUTIONS) for block in _blocks(module) for layer in block.modules()):
        raise ValueError(f'compile = "blocks": {name} has convolutions in its blocks, so it needs no adapters')


def _blocks(module: Any) -> list[torch.nn.Module]:
    return [part for part in module.modules() if type(part).__name__ in module._repeated_blocks]


def compile_denoiser(method: SharedMethod, spec: ModelSpec) -> None:
    """Run a denoiser compiled from now on; torch compiles it at its first calls."""
    if spec.compile == "blocks":
        _compile_blocks(method.module, method.adapters if spec.adapter else None)
        method.replace(method.module)
    else:
        method.replace(torch.compile(method.module, backend=COMPILER))


def _compile_blocks(module: Any, adapters: RowAdapters | None) -> None:
    torch._dynamo.config.recompile_limit = _MOST_GRAPHS
    # Else two lengths that are equal in one call would have to be equal in all calls of its graph.
    shapes_config.use_duck_shape = False
    if adapters is not None:
        adapters.prepare_for_compiler(_blocks(module))
    module.compile_repeated_blocks(backend=COMPILER, dynamic=True)


def end_compiling(method: SharedMethod, spec: ModelSpec) -> None:
    """Run blocks for which no graph fits uncompiled from now on."""
    if spec.compile == "blocks":
        method.replace(partial(_run_compiled, method.module))


def _run_compiled(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    with torch.compiler.set_stance(AFTER_WARM_UP):
        return module(*args, **kwargs)


def uncompile(method: SharedMethod) -> None:
    method.replace(None)
    for part in method.module.modules():
        part._compiled_call_impl = None
