"""Files of embeddings (textual inversion): the vectors of one word for the CLIP text encoders of a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from diffusers.loaders import TextualInversionLoaderMixin
from safetensors.torch import load_file
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from shared.config.adapters import AdapterSpec
from shared.errors import AdapterUnavailable
from shared.inputs.embedding_check import WIDTHS, check_vectors, is_embedding, tensors_of, vectors
from worker.engine.lora.new_tokens import NewTokens, TokenVectors, Word


class TokenTable(NamedTuple):
    """The token embedding of a text encoder at `path`; its tokenizer's ids end before `first_id`."""

    path: str
    first_id: int
    width: int


def token_tables(pipeline: Any) -> dict[str, TokenTable]:
    """Return the token embeddings of a pipeline's CLIP text encoders, by component; empty if it takes no embeddings."""
    tables: dict[str, TokenTable] = {}
    for number in ("", "_2", "_3") if isinstance(pipeline, TextualInversionLoaderMixin) else ():
        encoder = getattr(pipeline, f"text_encoder{number}", None)
        tokenizer = getattr(pipeline, f"tokenizer{number}", None)
        is_clip = isinstance(encoder, CLIPTextModel | CLIPTextModelWithProjection)
        if encoder is not None and is_clip and isinstance(tokenizer, CLIPTokenizer):
            table = encoder.get_input_embeddings()
            path = next(path for path, module in encoder.named_modules() if module is table)
            tables[f"text_encoder{number}"] = TokenTable(path, len(tokenizer), table.embedding_dim)
    return tables


def published_widths(pipeline: Any) -> Mapping[str, tuple[int, int]]:
    """Return first id and width of the token embeddings of a pipeline, as the API compares them with uploads.

    Also `WIDTHS` itself: without it they are not known.
    """
    tables = token_tables(pipeline)
    return {WIDTHS: (0, 0)} | {f"{WIDTHS}{name}": (table.first_id, table.width) for name, table in tables.items()}


def read_embedding(spec: AdapterSpec, file: Path, pipeline: Any) -> NewTokens:
    """Read the file of an embedding for the model of `pipeline`; raises `AdapterUnavailable` if it does not fit."""
    assert spec.token is not None
    tables = token_tables(pipeline)
    try:
        if not tables:
            lacking = "CLIP text encoders" if isinstance(pipeline, TextualInversionLoaderMixin) else "a loader of them"
            raise ValueError(f"{type(pipeline).__name__} takes no embeddings: it lacks {lacking}")
        state = load_file(file)
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        if not is_embedding(shapes):
            raise ValueError("it holds no embedding (emb_params, clip_l and clip_g, or its word)")
        check_vectors(shapes)
        names = tensors_of(shapes, {component: table.width for component, table in tables.items()})
        if not all(bool(tensor.isfinite().all()) for tensor in state.values()):
            raise ValueError("it has values that are not finite")
    except Exception as error:  # safetensors' own among them
        raise AdapterUnavailable(f"embedding {spec.id!r} ({file.name}) cannot be used: {str(error)[:400]}") from None
    count = max(vectors(shape) for shape in shapes.values())
    return NewTokens(
        (Word(spec.token, count),),
        {component: _vectors_of(state[name], tables[component]) for component, name in names.items()},
    )


def _vectors_of(tensor: torch.Tensor, table: TokenTable) -> TokenVectors:
    return TokenVectors(table.path, table.first_id, tensor.float().reshape(-1, table.width))
