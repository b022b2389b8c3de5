"""Tiny modular pipelines, of the parts of classic ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import diffusers


def modular(class_name: str, module: str, name: str, **more: Any) -> Any:
    """Return a modular pipeline with the parts of a tiny classic one that its blocks expect, and `more`."""
    parts = {**import_module(f"tiny.{module}").PIPELINES[name]().components, **more}
    pipeline = getattr(diffusers, class_name)()
    pipeline.update_components(
        **{part: parts[part] for part in pipeline.pretrained_component_names if parts.get(part) is not None}
    )
    return pipeline


PIPELINES: dict[str, Callable[[], Any]] = {
    "modular-sdxl": partial(modular, "StableDiffusionXLModularPipeline", "images.stable", "sdxl"),
    "modular-sd3": partial(modular, "StableDiffusion3ModularPipeline", "images.stable", "sd3"),
    "modular-flux": partial(modular, "FluxModularPipeline", "images.stable", "flux"),
    "modular-qwen-image": partial(modular, "QwenImageModularPipeline", "images.qwen", "qwen-image"),
    "modular-z-image": partial(modular, "ZImageModularPipeline", "images.zimage", "z-image"),
    "modular-flux-kontext": partial(modular, "FluxKontextModularPipeline", "images.flux", "flux-kontext"),
    "modular-flux-2-dev": partial(modular, "Flux2ModularPipeline", "images.flux2", "flux-2-dev"),
    "modular-flux-2-klein": partial(modular, "Flux2KleinModularPipeline", "images.flux2", "flux-2-klein"),
    "modular-flux-2-klein-base": partial(modular, "Flux2KleinBaseModularPipeline", "images.flux2", "flux-2-klein-base"),
    "modular-qwen-image-edit": partial(modular, "QwenImageEditModularPipeline", "images.qwen", "qwen-image-edit"),
    "modular-qwen-image-edit-plus": partial(
        modular, "QwenImageEditPlusModularPipeline", "images.qwen", "qwen-image-edit-plus"
    ),
    "modular-qwen-image-layered": partial(
        modular, "QwenImageLayeredModularPipeline", "images.qwen", "qwen-image-layered"
    ),
    "modular-qwen-image-2.1": partial(modular, "QwenImage21ModularPipeline", "images.qwen21", "qwen-image-2.1"),
    "modular-qwen-image-2.1-turbo": partial(
        modular, "QwenImage21TurboModularPipeline", "images.qwen21", "qwen-image-2.1"
    ),
    "modular-krea-2": partial(modular, "Krea2ModularPipeline", "more.krea", "krea-2"),
    "modular-krea-2-turbo": partial(modular, "Krea2TurboModularPipeline", "more.krea", "krea-2"),
    "modular-ernie-image": partial(modular, "ErnieImageModularPipeline", "images.ernie", "ernie-image"),
}
