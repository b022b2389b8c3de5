"""Multipart fields as the equivalent JSON."""

from __future__ import annotations

from typing import Any

import pytest
from openai._qs import Querystring

from api.jobs.request import JobRequest
from api.protocols.openai.image_requests import ImageFields
from api.protocols.openai.request_bodies import numeric_fields, parse_form
from shared.errors import InvalidRequest

NUMERIC = numeric_fields(JobRequest, ImageFields)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "12", "n": 2, "guidance_scale": 3.5, "stream": True},
        {"prompt": "a", "metadata": {"seed": "7", "order": "12"}},
        {"images": ["in_a", "in_b"], "num_inference_steps": 8},
        {"adapters": [{"id": "a", "scale": 0.5}, {"id": "b", "scale": -1.0}], "strength": 0.25},
        {"controls": [{"id": "canny", "image": "in_a", "scale": 0.5, "start": 0.0, "end": 0.75}]},
        {"step_cache": {"every": 3, "first": 8, "last": 4, "order": "reuse"}},
        {"prompt": "x[0] = {y}", "seed": 2**62, "reproducible": False},
    ],
)
def test_the_sdks_encoding_is_parsed_back(body: dict[str, Any]) -> None:
    """Numeric fields become numbers; text that looks like a number stays text."""
    assert parse_form(Querystring(array_format="brackets").stringify_items(body), NUMERIC) == body


def test_an_invalid_number_is_left_to_the_validation_of_the_body() -> None:
    assert parse_form([("seed", "many"), ("steps", "1e999999")], NUMERIC) == {"seed": "many", "steps": "1e999999"}


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
def test_an_invalid_field_name_is_refused(items: list[tuple[str, str]]) -> None:
    with pytest.raises(InvalidRequest) as error:
        parse_form(items, NUMERIC)
    assert error.value.param == items[-1][0]


def test_numeric_fields_are_taken_from_the_schemas() -> None:
    assert {"steps", "num_inference_steps", "seed", "n", "stream", "partial_images", "scale"} <= NUMERIC
    assert not {"prompt", "size", "model", "priority", "image"} & NUMERIC
