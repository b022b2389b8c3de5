"""Multipart fields read back into the JSON that they stand for."""

from __future__ import annotations

from typing import Any

import pytest
from openai._qs import Querystring

from api.compat.openai.request_bodies import numeric_fields, parse_form
from shared.config.adapters import AdapterChoice
from shared.errors import InvalidRequest
from shared.protocols.openai.images import ImageFields
from shared.request import JobRequest

NUMBERS = numeric_fields(JobRequest, ImageFields, AdapterChoice)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "12", "n": 2, "guidance_scale": 3.5, "stream": True},
        {"prompt": "a", "metadata": {"seed": "7", "order": "12"}},
        {"images": ["in_a", "in_b"], "num_inference_steps": 8},
        {"adapters": [{"id": "a", "scale": 0.5}, {"id": "b", "scale": -1.0}], "strength": 0.25},
        {"prompt": "x[0] = {y}", "seed": 2**62, "reproducible": False},
    ],
)
def test_what_the_sdk_writes_is_read_back(body: dict[str, Any]) -> None:
    """Numbers come back as numbers, and texts that look like one as texts."""
    assert parse_form(Querystring(array_format="brackets").stringify_items(body), NUMBERS) == body


def test_what_is_no_number_is_left_for_the_check_of_the_body() -> None:
    assert parse_form([("seed", "many"), ("steps", "1e999999")], NUMBERS) == {"seed": "many", "steps": "1e999999"}


@pytest.mark.parametrize(
    "items",
    [
        [("n", "1"), ("n", "2")],
        [("metadata", "x"), ("metadata[a]", "y")],
        [("metadata[a]", "y"), ("metadata[]", "x")],
        [("a[b][c][d][e]", "1")],
        [("", "1")],
        [("a[b", "1")],
    ],
)
def test_what_cannot_be_placed_is_refused_by_name(items: list[tuple[str, str]]) -> None:
    with pytest.raises(InvalidRequest) as told:
        parse_form(items, NUMBERS)
    assert told.value.param == items[-1][0]


def test_the_numeric_fields_are_those_of_the_schema() -> None:
    assert {"steps", "num_inference_steps", "seed", "n", "stream", "partial_images", "scale"} <= NUMBERS
    assert not {"prompt", "size", "model", "priority", "image"} & NUMBERS
