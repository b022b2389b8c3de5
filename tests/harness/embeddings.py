"""Helpers of embedding tests: models with embeddings, and the images of their jobs by plain diffusers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny import embeddings

from harness.adapters import load_pipeline, mixable
from harness.engine import a_job, a_spec
from shared.config.adapters import Adapter, AdapterSpec
from shared.config.model_spec import ModelSpec
from shared.job import Job
from worker.engine.pipelines.call_arguments import arguments_for
from worker.engine.pipelines.call_results import make_results
from worker.engine.pipelines.input_images import InputImages


@dataclass(frozen=True)
class Embedding:
    """An embedding of a tiny model: its word, and its vectors by text encoder."""

    token: str
    file: Path
    vectors: Mapping[str, torch.Tensor]


def make_embeddings(source: Path, folder: Path) -> dict[str, Embedding]:
    """Write embeddings of one and of several vectors for a model, three of them for the same word."""
    pipeline = load_pipeline(source)
    made = {}
    for seed, (name, token, count) in enumerate(
        (
            ("cat", "<cat>", 1),
            ("dog", "<cat>", 3),
            ("easy", "EasyNeg", 1),
            ("bad", "bad-hands-5", 4),
            ("fox", "<cat>", 1),
        ),
        1,
    ):
        vectors = embeddings.vectors(pipeline, seed, count)
        key = token if name == "cat" else "emb_params"  # diffusers' own form, and the usual one
        made[name] = Embedding(token, embeddings.save(folder / f"{name}.safetensors", vectors, key), vectors)
    return made


def spec_with(source: Path, files: Mapping[str, Embedding], **fields: Any) -> ModelSpec:
    specs = (AdapterSpec(id=name, source=str(one.file), token=one.token) for name, one in files.items())
    return a_spec(source, adapter=(*specs, *fields.pop("adapter", ())), **fields)


def a_job_with(id_: str, *names: str, **fields: Any) -> Job:
    adapters = tuple(Adapter(id=name) for name in names)
    return mixable(a_job(id_, adapters=adapters, **{"steps": 3, "guidance_scale": 4.0} | fields))


def plain_pipeline(source: Path, files: Mapping[str, Embedding], job: Job) -> Any:
    """Return a pipeline into which diffusers has loaded the embeddings of a job."""
    pipeline = load_pipeline(source)
    for name in sorted(one.id for one in job.adapters if one.id in files):
        for component, vectors in files[name].vectors.items():
            tokenizer = getattr(pipeline, component.replace("text_encoder", "tokenizer"))
            encoder = getattr(pipeline, component)
            state = {"emb": vectors}
            pipeline.load_textual_inversion(state, token=files[name].token, tokenizer=tokenizer, text_encoder=encoder)
    return pipeline


def plain_image(source: Path, files: Mapping[str, Embedding], job: Job) -> np.ndarray:
    """Return the image of a job by diffusers alone."""
    pipeline = plain_pipeline(source, files, job)
    with torch.no_grad():
        (output,) = make_results(pipeline, arguments_for(pipeline, job, 0, InputImages()))
    return output.pixels
