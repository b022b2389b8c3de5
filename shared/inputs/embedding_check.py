"""Embeddings (textual inversion) in safetensors files: which tensors are one, its word, and the text encoders it fits.

Pure functions of names and shapes, for the API, which checks uploads without torch, and for workers.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import PurePath

from shared.config.adapters import TOKEN_PATTERN

MAX_VECTORS = 75
"""Of one embedding: as many tokens as a prompt of CLIP has."""

WIDTHS = "embeddings."
"""Prefix of the published layers that are the token tables of text encoders: `embeddings.text_encoder`."""

_ANY_ENCODER = "emb_params"
_OF_ENCODERS = {"clip_l": "text_encoder", "clip_g": "text_encoder_2"}
_TOKEN = re.compile(TOKEN_PATTERN)

Shapes = Mapping[str, Sequence[int]]


def is_embedding(shapes: Shapes) -> bool:
    """Return whether the tensors of a file are an embedding: by usual names, or a single one by the name of its word.

    Names of weights have dots.
    """
    return not shapes.keys().isdisjoint({_ANY_ENCODER, *_OF_ENCODERS}) or own_token(shapes) is not None


def own_token(shapes: Shapes) -> str | None:
    """Return the word in an embedding's file, as diffusers writes it; None if it has none."""
    name = next(iter(shapes), "")
    named = len(shapes) == 1 and name not in {_ANY_ENCODER, *_OF_ENCODERS} and len(shapes[name]) <= 2
    return name if named and "." not in name and _TOKEN.fullmatch(name) else None


def token_of(shapes: Shapes, file_name: str) -> str | None:
    """Return the word of an embedding: its own, or the file's name without its ending; None if that is no word."""
    token = own_token(shapes) or PurePath(file_name).stem
    return token if _TOKEN.fullmatch(token) else None


def check_vectors(shapes: Shapes) -> None:
    """Raise `ValueError` for tensors that are no vectors of one word."""
    others = shapes.keys() - {_ANY_ENCODER, *_OF_ENCODERS}
    if len(shapes) > 1 and (others or _ANY_ENCODER in shapes):
        raise ValueError(f"an embedding is one tensor, or clip_l and clip_g; it has {', '.join(sorted(shapes))[:200]}")
    counts = {name: vectors(shape) for name, shape in shapes.items()}
    for name, count in counts.items():
        if not 1 <= len(shapes[name]) <= 2:
            raise ValueError(f"{name} is neither a vector nor a matrix of vectors")
        if count > MAX_VECTORS:
            raise ValueError(f"{name} has {count} vectors; at most {MAX_VECTORS} are allowed")
    if len(set(counts.values())) > 1:
        raise ValueError(f"clip_l has {counts['clip_l']} vectors, and clip_g {counts['clip_g']}")


def vectors(shape: Sequence[int]) -> int:
    return 1 if len(shape) < 2 else shape[0]


def tensors_of(shapes: Shapes, widths: Mapping[str, int]) -> dict[str, str]:
    """Return the tensor of each CLIP text encoder of a model; `widths` are those of its tokens.

    Raises `ValueError` for an embedding of other encoders, or of another width.
    """
    if shapes.keys() <= _OF_ENCODERS.keys():
        tensors = {_OF_ENCODERS[name]: name for name in shapes}
    else:
        tensors = dict.fromkeys(widths, next(iter(shapes)))
        if len(widths) > 1:
            raise ValueError("the model has two CLIP text encoders: the file needs clip_l and clip_g")
    if tensors.keys() != widths.keys():
        raise ValueError(f"it has vectors for {_listed(tensors)}, and the CLIP text encoders are {_listed(widths)}")
    for component, name in tensors.items():
        if shapes[name][-1] != widths[component]:
            wide = f"{shapes[name][-1]} values a vector, and {component} of the model takes {widths[component]}"
            raise ValueError(f"{name} has {wide}")
    return tensors


def _listed(names: Collection[str]) -> str:
    return " and ".join(sorted(names))
