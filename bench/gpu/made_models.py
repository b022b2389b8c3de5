"""Models of real shape whose weights are made in device memory in seconds: nothing is written or read.

A model's folder has no weights: an index, which says what a loaded model has, and files that state the sizes. In a dry
run the same names are the tests' tiny pipelines.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bench.engine.real_shapes import REAL_SHAPES
from bench.engine.shapes import Pipeline
from bench.gpu.stage import DEVICE, DRY

DTYPE = torch.bfloat16
DESCRIPTION = "made.json"
_made: dict[str, Pipeline] = {}


def make(shape: str) -> Pipeline:
    """Return the pipeline of a shape; all its models in this process share it."""
    if shape not in _made:
        torch.manual_seed(7)
        with _defaults(DEVICE):
            pipeline = _build(shape)
        for module in _modules(pipeline).values():
            module.eval().requires_grad_(False)
            _keep_in_float32(module)
        pipeline.set_progress_bar_config(disable=True)
        _made[shape] = pipeline
    return _made[shape]


def save_folder(shape: str, folder: Path) -> Path:
    """Write the folder of a model without weights."""
    with _defaults("cpu" if DRY else "meta"):
        pipeline = _build(shape)
    index: dict[str, Any] = {"_class_name": type(pipeline).__name__}
    for name, part in pipeline.components.items():
        if part is None:
            continue
        index[name] = [type(part).__module__.partition(".")[0], type(part).__name__]
        (folder / name).mkdir(parents=True)
        if isinstance(part, torch.nn.Module):
            _state_size(folder / name, sum(tensor.nbytes for tensor in (*part.parameters(), *part.buffers())))
    (folder / "model_index.json").write_text(json.dumps(index))
    (folder / DESCRIPTION).write_text(json.dumps({"shape": shape}))
    return folder


class Loader:
    """Takes the place of `DiffusionPipeline` in the engine: makes the models of this module's folders."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def from_pretrained(self, folder: Path, **options: Any) -> Pipeline:
        description = Path(folder) / DESCRIPTION
        if not description.exists():
            return self._original.from_pretrained(folder, **options)
        return make(json.loads(description.read_text())["shape"])


def use_made_models() -> None:
    """Let the engines of this process load the folders of made models."""
    from worker.engine.pipelines import loading

    if not isinstance(loading._LOADER, Loader):
        loading._LOADER = Loader(loading._LOADER)


def denoiser_of(pipeline: Pipeline) -> torch.nn.Module:
    module: torch.nn.Module = getattr(pipeline, "unet", None) or pipeline.transformer
    return module


def billions(pipeline: Pipeline) -> dict[str, float]:
    """Return the parameters of each module, in billions."""
    sizes = {name: sum(one.numel() for one in part.parameters()) for name, part in _modules(pipeline).items()}
    return {name: round(size / 1e9, 2) for name, size in sizes.items()}


def _build(shape: str) -> Pipeline:
    if not DRY:
        return REAL_SHAPES[shape]()
    from tiny.registry import module_of

    return module_of(shape).PIPELINES[shape]()


def _state_size(folder: Path, nbytes: int) -> None:
    """Write the header of a file with `nbytes` of weights: it is all that is read before a load."""
    header = json.dumps({"all": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


def _modules(pipeline: Pipeline) -> dict[str, torch.nn.Module]:
    return {name: part for name, part in pipeline.components.items() if isinstance(part, torch.nn.Module)}


def _keep_in_float32(module: torch.nn.Module) -> None:
    """Cast what diffusers loads in float32 whatever the dtype."""
    kept = getattr(module, "_keep_in_fp32_modules", None) or ()
    for name, parameter in module.named_parameters():
        if type(module).__module__.startswith("diffusers") and not set(kept).isdisjoint(name.split(".")):
            parameter.data = parameter.data.float()


@contextmanager
def _defaults(device: str) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPE)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)
