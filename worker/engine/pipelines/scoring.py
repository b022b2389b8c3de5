"""The scorer of a model: CLIP's encoders, by which the predicted images of candidates are compared.

Its encoders are shared modules as those of the pipeline: calls of all image tasks share forwards, and the embedding of
a prompt is cached.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoTokenizer, CLIPConfig, CLIPTextModelWithProjection, CLIPVisionModelWithProjection

from shared.config.candidates import ScorerSpec
from shared.config.model_spec import ModelSpec
from worker.engine.fusion.module_proxy import SharedMethod
from worker.engine.pipelines.clones import Pipeline
from worker.engine.pipelines.stand_ins import stand_in_for
from worker.engine.pipelines.task_pipelines import call_parameters, pipeline_for
from worker.engine.pipelines.text_cache import CachedTokenizer
from worker.engine.weights.requirements import cached_scorer

DIGITS = 4
"""Of scores: with fewer rows in a forward, the last digits of float32 differ."""

_PIXELS = ("image_mean", (0.48145466, 0.4578275, 0.40821073)), ("image_std", (0.26862954, 0.26130258, 0.27577711))
"""Means and deviations of colours: those of CLIP, where a folder does not say others."""

Head = Sequence[tuple[torch.Tensor, torch.Tensor | None]]
_TEXTS: Any = CLIPTextModelWithProjection
_IMAGES: Any = CLIPVisionModelWithProjection


@dataclass
class ScorerParts:
    """What is loaded of a scorer: encoders, tokenizer, and the colours and the side of its images."""

    images: torch.nn.Module
    texts: torch.nn.Module | None
    tokenizer: Any
    colours: Sequence[torch.Tensor]
    side: int
    head: Head


@dataclass
class Scorer:
    """The scorer of a loaded model; image tasks call its stand-ins. `modules` are by their names among the model's."""

    parts: ScorerParts
    images: Any
    texts: Any
    modules: Mapping[str, torch.nn.Module]
    shared_methods: list[SharedMethod]
    device: torch.device

    def text(self, prompt: str) -> torch.Tensor | None:
        """Return the embedding of a prompt [1, values]; None with a head, which reads images only."""
        if self.texts is None:
            return None
        tokens = self.parts.tokenizer(
            prompt,
            padding="max_length",
            truncation=True,
            max_length=self.texts.config.max_position_embeddings,
            return_tensors="pt",
        ).input_ids
        embedding: torch.Tensor = self.texts(tokens.to(self.device)).text_embeds
        return embedding

    def score(self, image: torch.Tensor, text: torch.Tensor | None) -> float | None:
        """Return the score of an image [1, 3, height, width] of 0 to 1; None without a finite one.

        An image of other proportions is squeezed, so that all of it counts.
        """
        size = (self.parts.side, self.parts.side)
        pixels = functional.interpolate(image.float(), size=size, mode="bicubic", antialias=True).clamp(0, 1)
        mean, deviation = (values.view(1, 3, 1, 1) for values in self.parts.colours)
        embedding = self.images((pixels - mean).div(deviation).to(self.images.dtype)).image_embeds.float()
        if text is not None:
            value = functional.cosine_similarity(embedding, text.float())
        else:
            value = functional.normalize(embedding, dim=-1)
            for weight, bias in self.parts.head:
                value = functional.linear(value, weight, bias)
        score = value.reshape(-1)[0]
        return round(float(score), DIGITS) if torch.isfinite(score) else None


def load_scorer(spec: ModelSpec, pipeline: Pipeline) -> ScorerParts | None:
    """Return the parts of a model's scorer, None if it has none; raises `ValueError` for one that does not fit."""
    if spec.scorer is None:
        return None
    folder = cached_scorer(spec.scorer)
    if folder is None:
        raise ValueError(f"scorer: {spec.scorer.source} holds no CLIP model (no config.json)")
    if not any(takes_marks(pipeline_for(task, pipeline)) for task in spec.tasks):
        raise ValueError(f"scorer: {type(pipeline).__name__} says nothing of its steps; remove it")
    config = _config_of(spec.scorer, folder)
    # A similarity in bfloat16 has three digits.
    dtype = torch.float16 if spec.dtype == "float16" else torch.float32
    options = {"dtype": dtype, "use_safetensors": True, "local_files_only": True}
    images = _IMAGES.from_pretrained(folder, config=config.vision_config, **options).eval()
    head = [] if spec.scorer.head is None else _head(Path(spec.scorer.head), images.config.projection_dim)
    tokenizer = None if head else CachedTokenizer(AutoTokenizer.from_pretrained(folder, local_files_only=True))
    texts = None if head else _TEXTS.from_pretrained(folder, config=config.text_config, **options).eval()
    return ScorerParts(images, texts, tokenizer, _colours(folder), images.config.image_size, head)


def _config_of(spec: ScorerSpec, folder: Path) -> Any:
    held = json.loads((folder / "config.json").read_text("utf-8"))
    kind = held.get("model_type")
    if kind != "clip":
        raise ValueError(f"scorer: {spec.source} is of type {kind!r}; use a CLIP model")
    config: Any = CLIPConfig.from_pretrained(folder, local_files_only=True)
    for part in (config.text_config, config.vision_config):
        part.projection_dim = config.projection_dim  # it says it for both
    return config


def takes_marks(pipeline: Pipeline) -> bool:
    """Return whether candidates of a pipeline can be scored between its steps."""
    return "callback_on_step_end" in call_parameters(pipeline) and getattr(pipeline, "vae", None) is not None


def _colours(folder: Path) -> list[torch.Tensor]:
    file = folder / "preprocessor_config.json"
    found: Mapping[str, Any] = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    return [torch.tensor(found.get(name, usual), dtype=torch.float32) for name, usual in _PIXELS]


def _head(file: Path, width: int) -> Head:
    """Return the linear layers of a head, in the order of their names."""
    tensors = {name: tensor.float() for name, tensor in load_file(file).items()}
    names = [name for name in sorted(tensors, key=_by_number) if name.endswith("weight")]
    layers = [(tensors[name], tensors.get(name.removesuffix("weight") + "bias")) for name in names]
    for weight, _ in layers:
        if weight.ndim != 2 or weight.shape[1] != width:
            raise ValueError(f"scorer: {file.name} has a layer {list(weight.shape)}, where {width} values come in")
        width = weight.shape[0]
    if width != 1 or not layers:
        raise ValueError(f"scorer: {file.name} ends in {width} values; a head has one")
    return layers


def _by_number(name: str) -> list[tuple[int, str]]:
    return [(int(part) if part.isdigit() else -1, part) for part in name.split(".")]


def make_scorer(parts: ScorerParts, spec: ModelSpec, device: torch.device) -> Scorer:
    """Return the scorer of a model on its device, with stand-ins for its encoders."""
    encoders = {"scorer_images": parts.images, "scorer_texts": parts.texts}
    modules = {name: module for name, module in encoders.items() if module is not None}
    stand_ins, shared_methods = dict[str, Any](), list[SharedMethod]()
    for name, module in modules.items():
        module.requires_grad_(False).to(device)
        stand_ins[name], methods = stand_in_for(name, module, spec, device)
        shared_methods += methods.values()
    parts.colours = [values.to(device) for values in parts.colours]
    parts.head = [(weight.to(device), None if bias is None else bias.to(device)) for weight, bias in parts.head]
    images, texts = stand_ins["scorer_images"], stand_ins.get("scorer_texts")
    return Scorer(parts, images, texts, modules, shared_methods, device)
