"""The modules of a loaded pipeline, as image tasks use them."""

from functools import partial
from types import SimpleNamespace

import torch
from transformers import CLIPTextModel

from worker.engine.pipelines.clones import Pipeline
from worker.engine.pipelines.modular import all_blocks, is_modular


def modules_of(pipeline: Pipeline) -> dict[str, torch.nn.Module]:
    """Return the modules of a pipeline by name, with what it expects of those of an earlier transformers."""
    modules = {name: part for name, part in pipeline.components.items() if isinstance(part, torch.nn.Module)}
    for module in modules.values():
        if isinstance(module, CLIPTextModel) and not hasattr(module, "text_model"):
            # With `clip_skip`, Stable Diffusion 1.x calls `text_model.final_layer_norm`, which transformers 5 moved.
            vars(module)["text_model"] = SimpleNamespace(final_layer_norm=partial(_normalize, module.final_layer_norm))
    return modules


def _normalize(norm: torch.nn.LayerNorm, hidden: torch.Tensor) -> torch.Tensor:
    """Apply a layer outside of its module's forward, where an offloaded one is on another device."""
    weight, bias = (None if one is None else one.to(hidden.device) for one in (norm.weight, norm.bias))
    return torch.nn.functional.layer_norm(hidden, norm.normalized_shape, weight, bias, norm.eps)


def vae_cast_of(pipeline: Pipeline, dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype of a VAE and its inputs if the pipeline casts them at every call, like XL; None otherwise.

    The VAE is shared, so it stays in one dtype: float32 for a model in float16, whose largest value its activations
    exceed. In bfloat16 pipelines decode as it is, and cast to float32 only to encode.
    """
    vae = getattr(pipeline, "vae", None)
    forced = getattr(getattr(vae, "config", None), "force_upcast", False)
    casting = all_blocks(pipeline._blocks) if is_modular(pipeline) else [pipeline]
    if not forced or dtype is torch.float32 or not any(hasattr(one, "upcast_vae") for one in casting):
        return None
    return torch.float32 if dtype is torch.float16 else dtype
