"""FLUX.1 Redux: an image becomes tokens behind those of the prompt, or in place of a prompt."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import FluxPriorReduxPipeline

from shared.config.model_index import read_index
from shared.config.model_spec import ModelSpec
from shared.job import Job
from worker.engine.fusion.module_proxy import SharedMethod
from worker.engine.pipelines.clones import Pipeline, make_template
from worker.engine.pipelines.input_images import InputImages
from worker.engine.pipelines.modules import modules_of
from worker.engine.pipelines.stand_ins import stand_in_for
from worker.engine.weights.completeness import check_folder, check_weights
from worker.engine.weights.requirements import cached_folder

_DENOISER = "FluxTransformer2DModel"
_OF_TEXT = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
_TEXTS = ("prompt", "prompt_2")
_LENGTH = 512  # of the empty prompt of diffusers' pipeline


@dataclass
class Redux:
    """The encoders of images of one model, in the template of diffusers' pipeline. `modules` are by their names among
    the model's."""

    template: Pipeline
    shared_methods: list[SharedMethod]
    modules: Mapping[str, torch.nn.Module]

    def with_image(
        self, pipeline: Pipeline, job: Job, inputs: InputImages, arguments: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the arguments of a call with the embeddings of a job's prompt and image in place of the prompt.

        They are `arguments` for a job without such an image. Without a prompt the embeddings of text are zeros.
        """
        pairs = zip(job.controls, inputs.controls, strict=True)
        found = next(((control.scale, image) for control, image in pairs if control.kind == "redux"), None)
        if found is None:
            return arguments
        scale, image = found
        prior = copy.copy(self.template)
        prior.__dict__["text_encoder"] = pipeline.text_encoder  # its dtype is read
        states, pooled = _text(pipeline, arguments)
        made = prior(image, prompt_embeds=states, pooled_prompt_embeds=pooled, prompt_embeds_scale=float(scale))
        values = {name: value for name, value in arguments.items() if name not in _TEXTS}
        return values | {"prompt_embeds": made.prompt_embeds, "pooled_prompt_embeds": made.pooled_prompt_embeds}


def _text(pipeline: Pipeline, arguments: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    texts = {name: arguments.get(name) or None for name in _TEXTS}
    length = arguments.get("max_sequence_length") or _LENGTH
    if texts["prompt"] is not None:
        device = pipeline._execution_device
        states, pooled, _ = pipeline.encode_prompt(**texts, device=device, max_sequence_length=length)
        return states, pooled.clone()  # the prior scales it in place
    denoiser = pipeline.transformer
    sizes = ((1, length, denoiser.config.joint_attention_dim), (1, denoiser.config.pooled_projection_dim))
    states, pooled = (torch.zeros(size, device=denoiser.device, dtype=denoiser.dtype) for size in sizes)
    return states, pooled


def load_redux(spec: ModelSpec, pipeline: Pipeline, options: Mapping[str, Any]) -> Pipeline | None:
    """Return the pipeline that encodes images for a model, None if it has none; `options` are of `from_pretrained`.

    Raises `ValueError` for one that does not fit the model.
    """
    control = next((one for one in spec.control if one.kind == "redux"), None)
    if control is None:
        return None
    folder = cached_folder(control)
    denoiser: Any = getattr(pipeline, "transformer", None)
    if type(denoiser).__name__ != _DENOISER or not any(task.takes_controls for task in spec.tasks):
        raise ValueError(f"control {control.id!r}: Redux is for FLUX.1, from text, from an image or inpainting")
    held = None if folder is None else read_index(folder).get("_class_name")
    if folder is None or held != FluxPriorReduxPipeline.__name__:
        raise ValueError(f"control {control.id!r}: no FluxPriorReduxPipeline at {control.source}")
    index = {name: part for name, part in read_index(folder).items() if name not in _OF_TEXT}
    check_folder(folder, index, {})
    own = {**options, "variant": control.variant}
    prior: Pipeline = FluxPriorReduxPipeline.from_pretrained(folder, **own, **dict.fromkeys(_OF_TEXT))
    check_weights(prior)
    width, needed = prior.image_embedder.config.txt_in_features, denoiser.config.joint_attention_dim
    if width != needed:
        raise ValueError(f"control {control.id!r}: its embeddings have {width} values, and the model needs {needed}")
    return prior


def make_redux(prior: Pipeline, spec: ModelSpec, device: torch.device) -> Redux:
    """Return the encoders of images of a model on its device, with stand-ins for their modules."""
    prior.to(device)
    stand_ins, shared_methods, modules = {}, list[SharedMethod](), dict[str, torch.nn.Module]()
    for name, module in modules_of(prior).items():
        own = f"redux_{name}"
        modules[own] = module
        stand_ins[name], methods = stand_in_for(own, module, spec, device)
        shared_methods += methods.values()
    return Redux(make_template(prior, stand_ins, device), shared_methods, modules)
