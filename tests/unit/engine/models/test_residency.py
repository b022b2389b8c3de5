"""Decisions on where models stay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from shared.config.model_spec import ModelSpec
from shared.config.weight_formats import Quantization
from worker.engine.models.residency import ModelInMemory, dropped_for, next_evicted, why_not_kept

OLD, MIDDLE, NEW = (ModelInMemory(model, 10, at) for at, model in enumerate(("old", "middle", "new")))


@pytest.mark.parametrize(
    ("nbytes", "room", "dropped"),
    [
        (5, 5, []),
        (5, 4, ["old"]),
        (15, 4, ["old", "middle"]),
        (30, 0, ["old", "middle", "new"]),
        (31, 0, None),  # nothing is dropped for what does not fit
        (5, -15, ["old", "middle"]),
        (0, -1, ["old"]),
    ],
)
def test_kept_models_are_dropped_in_the_order_of_their_last_use(
    nbytes: int, room: int, dropped: Sequence[str] | None
) -> None:
    assert dropped_for(nbytes, [NEW, OLD, MIDDLE], room) == dropped


@pytest.mark.parametrize(
    ("busy", "pinned", "evicted"),
    [
        ((), (), "old"),
        (("old",), (), "middle"),
        ((), ("old",), "middle"),
        (("middle",), ("old",), "new"),
        (("middle", "new"), ("old",), None),
    ],
)
def test_the_least_recently_used_model_without_jobs_and_pins_is_evicted(
    busy: Sequence[str], pinned: Sequence[str], evicted: str | None
) -> None:
    assert next_evicted([NEW, OLD, MIDDLE], busy, pinned) == evicted


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"layerwise_casting": "float8_e4m3fn"}, None),
        ({"vae_tiling": True}, None),
        ({"compile": True}, "compile"),
        ({"compile": "blocks"}, "compile"),
        ({"offload": "group"}, "offload"),
        ({"devices": 2}, "devices"),
        ({"quantization": Quantization(denoiser="torchao-int8")}, "quantization"),
    ],
)
def test_models_that_belong_to_their_device_are_not_kept(fields: dict[str, Any], reason: str | None) -> None:
    assert why_not_kept(ModelSpec(id="one", source="/none", **fields)) == reason
