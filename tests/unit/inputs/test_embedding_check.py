"""Embeddings: which files are one, their words, and the models that they fit."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from shared.inputs.embedding_check import check_vectors, is_embedding, tensors_of, token_of

CLIP_L = {"text_encoder": 768}
XL = {"text_encoder": 768, "text_encoder_2": 1280}
OF_XL = {"clip_l": (2, 768), "clip_g": (2, 1280)}
Shapes = dict[str, tuple[int, ...]]


@pytest.mark.parametrize(
    ("shapes", "file_name", "token"),
    [
        ({"emb_params": (8, 768)}, "EasyNegative.safetensors", "EasyNegative"),
        (OF_XL, "bad-hands-5.safetensors", "bad-hands-5"),
        ({"<cat-toy>": (768,)}, "learned_embeds.safetensors", "<cat-toy>"),
        ({"emb_params": (768,)}, "a (1).safetensors", None),
        ({"emb_params": (768,)}, "", None),
    ],
)
def test_an_embedding_has_the_word_in_its_file_or_the_name_of_the_file(
    shapes: Shapes, file_name: str, token: str | None
) -> None:
    assert is_embedding(shapes)
    check_vectors(shapes)
    assert token_of(shapes, file_name) == token


@pytest.mark.parametrize(
    "shapes",
    [
        {"unet.x.lora_A.weight": (1, 2)},
        {"weight.x": (1, 2)},
        {"word": (1, 2, 3)},
        {"one": (768,), "two": (768,)},
        {},
    ],
)
def test_other_files_are_none(shapes: Shapes) -> None:
    assert not is_embedding(shapes)


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        ({"emb_params": (76, 768)}, "emb_params has 76 vectors; at most 75"),
        ({"emb_params": ()}, "neither a vector nor a matrix"),
        ({"emb_params": (1, 2, 768)}, "neither a vector nor a matrix"),
        ({"emb_params": (1, 768), "clip_l": (1, 768)}, "one tensor, or clip_l and clip_g"),
        ({"clip_l": (1, 768), "other": (1, 768)}, "it has clip_l, other"),
        ({"clip_l": (1, 768), "clip_g": (2, 1280)}, "clip_l has 1 vectors, and clip_g 2"),
    ],
)
def test_vectors_of_no_single_word_are_refused(shapes: Shapes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_vectors(shapes)


@pytest.mark.parametrize(
    ("shapes", "widths", "expected"),
    [
        ({"emb_params": (3, 768)}, CLIP_L, {"text_encoder": "emb_params"}),
        ({"<a>": (1280,)}, {"text_encoder_2": 1280}, {"text_encoder_2": "<a>"}),
        (OF_XL, XL, {"text_encoder": "clip_l", "text_encoder_2": "clip_g"}),
        ({"clip_l": (2, 768)}, CLIP_L, {"text_encoder": "clip_l"}),
        ({"emb_params": (3, 1024)}, CLIP_L, "1024 values a vector, and text_encoder of the model takes 768"),
        ({"emb_params": (3, 768)}, XL, "needs clip_l and clip_g"),
        ({"clip_l": (2, 768)}, XL, "vectors for text_encoder, and .* text_encoder and text_encoder_2"),
        (OF_XL, CLIP_L, "vectors for text_encoder and text_encoder_2, and .* are text_encoder$"),
        ({**OF_XL, "clip_g": (2, 1024)}, XL, "clip_g has 1024"),
    ],
)
def test_each_text_encoder_has_its_tensor(shapes: Shapes, widths: dict[str, int], expected: Any) -> None:
    is_refused = isinstance(expected, str)
    with pytest.raises(ValueError, match=expected) if is_refused else contextlib.nullcontext():
        assert tensors_of(shapes, widths) == expected
