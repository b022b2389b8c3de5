"""Bodies of every protocol: any JSON is a valid request or an `InvalidRequest`, never another error."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from api import strict_json
from api.jobs.request import JobRequest, validated
from api.jobs.resolve import parse_checked
from api.protocols.fal.queue_requests import FalFields
from api.protocols.fal.queue_requests import parse_input as parse_fal_input
from api.protocols.huggingface.routes import parse_inference_request
from api.protocols.openai.batch_routes import BatchRequest
from api.protocols.openai.image_requests import ImageFields, parse_image_request
from api.protocols.openai.request_bodies import numeric_fields, parse_form
from api.protocols.openai.video_requests import VideoFields, parse_video_request
from api.protocols.replicate.prediction_inputs import JOB_FIELDS, ReplicateFields, parse_input
from api.protocols.replicate.prediction_routes import PredictionRequest, webhook_fields
from api.routes.webhooks import EndpointChange, EndpointRequest
from shared.config import models_file
from shared.config.adapters import AdapterChoice
from shared.config.catalog import Catalog
from shared.config.model_spec import ModelSpec
from shared.config.request_limits import Limits
from shared.errors import Faults, InvalidRequest, NotFound
from shared.tasks import Task

CATALOG = models_file.load(Path(__file__).resolve().parents[3] / "models.toml")
SPEC = next(iter(CATALOG))
TASKS = (Task.TEXT_TO_VIDEO, Task.IMAGE_TO_VIDEO)
FILMS = Catalog((ModelSpec(id="film", source="x", tasks=TASKS, limits=Limits(max_frames=81, frames_multiple=4)),))
NUMERIC = numeric_fields(JobRequest, ImageFields, VideoFields)
near = settings(max_examples=60, deadline=None, derandomize=True)

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.sampled_from((2**31, 10**400, 10**4299, -(10**4299)))  # JSON has up to 4,300 digits
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from((0, -1, 1e308, "", "auto", "1024x1024", "in_" + "0" * 32, "data:,", "https://a", "\ud800", "\0"))
)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner))


def bodies(*models: type[BaseModel], **fixed: Any) -> st.SearchStrategy[Any]:
    """Return bodies with some of the models' fields, and any other JSON."""
    names = sorted(
        {name for model in models for name in model.model_fields} | {"extra", "loras", "num_inference_steps"}
    )
    return st.dictionaries(st.sampled_from(names), values, max_size=6).map(lambda body: {**fixed, **body}) | values


ODD_NUMBERS = (True, -1, 2**70, 10**400, 10**4299, 1e-300, 1e308)
ODD_VALUES = (None, *ODD_NUMBERS, "", "\ud800", "\0", [], [[]], ["a", {}], {}, {"a": []}, [{"id": {}}], [{}])
PARSERS: dict[str, tuple[Callable[[Any], object], st.SearchStrategy[Any]]] = {
    "job": (
        lambda body: parse_checked(
            {"model": SPEC.id, **body} if isinstance(body, dict) else body, CATALOG.get, Faults()
        ),
        bodies(JobRequest, prompt="a"),
    ),
    "image": (
        lambda body: parse_image_request(body, CATALOG, "image_edit"),
        bodies(JobRequest, ImageFields, prompt="a"),
    ),
    "video": (lambda body: parse_video_request(body, FILMS), bodies(JobRequest, VideoFields, prompt="a")),
    "hugging face": (
        lambda body: parse_inference_request(body, SPEC.id, "*/*", CATALOG),
        bodies(JobRequest).map(lambda some: {"inputs": "a", "parameters": some}),
    ),
    "replicate": (
        lambda body: parse_input(body if isinstance(body, dict) else {}, SPEC, {}),
        bodies(JobRequest, ReplicateFields, prompt="a"),
    ),
    "fal": (lambda body: parse_fal_input(body, SPEC, {}), bodies(JobRequest, FalFields, prompt="a")),
    "prediction": (lambda body: webhook_fields(validated(PredictionRequest, body)), bodies(PredictionRequest)),
    "batch": (lambda body: validated(BatchRequest, body), bodies(BatchRequest)),
    "endpoint": (lambda body: validated(EndpointRequest, body), bodies(EndpointRequest, url="https://a")),
    "endpoint change": (lambda body: validated(EndpointChange, body), bodies(EndpointChange)),
}


@pytest.mark.parametrize("name", PARSERS)
@near
@given(data=st.data())
def test_any_json_is_a_request_or_an_invalid_one(name: str, data: st.DataObject) -> None:
    parser, strategy = PARSERS[name]
    body = data.draw(strategy)
    with contextlib.suppress(InvalidRequest, NotFound):
        parser(body)


@pytest.mark.parametrize("name", PARSERS)
def test_a_field_of_any_kind_is_valid_or_refused(name: str) -> None:
    fields = (
        *JobRequest.model_fields,
        *ImageFields.model_fields,
        *VideoFields.model_fields,
        *AdapterChoice.model_fields,
    )
    others = (
        *ReplicateFields.model_fields,
        *FalFields.model_fields,
        *PredictionRequest.model_fields,
        *JOB_FIELDS,
        "loras",
        "target_size",
    )
    for field in dict.fromkeys((*fields, *others, *BatchRequest.model_fields, *EndpointChange.model_fields)):
        for value in ODD_VALUES:
            body: dict[str, Any] = {"prompt": "a", field: value}
            with contextlib.suppress(InvalidRequest, NotFound):
                PARSERS[name][0]({"inputs": "a", "parameters": body} if name == "hugging face" else body)


MANY = 330_000
LARGE_BODIES = {
    "texts for a list": b'{"url": "https://a", "events": [' + b"1," * MANY + b"1]}",
    "objects for a list": b'{"prompt": "a", "adapters": [' + b"{}," * (MANY // 2) + b"{}]}",
    "unknown fields": b"{" + b",".join(b'"%x":1' % number for number in range(MANY // 5)) + b"}",
    "values of metadata": b'{"metadata": {' + b",".join(b'"%x":1' % number for number in range(MANY // 5)) + b"}}",
    "escaped texts": b'["\\u00e9"' + b",[]" * MANY + b"]",
}


@pytest.mark.parametrize("name", LARGE_BODIES)
def test_a_body_of_many_values_is_refused_before_its_validation(name: str) -> None:
    """Each invalid value would be an error of the validation, all of which are built: up to 7 s for one request."""
    with pytest.raises(InvalidRequest, match=f"more than {strict_json.MAX_VALUES} values"):
        strict_json.decode(LARGE_BODIES[name])


def test_json_of_as_many_values_as_allowed_is_decoded() -> None:
    values = list(range(strict_json.MAX_VALUES))
    assert strict_json.decode(json.dumps(values).encode()) == values
    with pytest.raises(InvalidRequest):
        strict_json.decode(json.dumps([*values, 0]).encode())
    with pytest.raises(InvalidRequest):
        strict_json.decode(json.dumps([{"a": [one]} for one in values]).encode())


@near
@given(value=values)
def test_valid_json_is_decoded_to_its_value(value: Any) -> None:
    readable = json.dumps(value, ensure_ascii=False)
    escaped = json.dumps(value).encode()
    if "\\u0000" in readable or "\ud800" in readable:
        with pytest.raises(InvalidRequest):
            strict_json.decode(escaped)
    else:
        assert strict_json.decode(escaped) == strict_json.decode(readable.encode()) == value


@near
@given(raw=st.binary(max_size=200) | st.text('{}[]",:0123456789eE+-.\\utrfalsn ', max_size=60).map(str.encode))
def test_any_bytes_are_json_or_an_invalid_request(raw: bytes) -> None:
    try:
        value = strict_json.decode(raw)
    except InvalidRequest:
        return
    assert json.loads(raw) == value
    assert not any(math.isnan(number) for number in _floats(value))


@near
@given(
    items=st.lists(
        st.tuples(
            st.from_regex(r"\w{0,5}(\[\w{0,3}\]){0,5}", fullmatch=True) | st.text(max_size=12),
            st.text(max_size=12) | st.sampled_from(("1e999", "-0", "true", "9" * 20, "1" * 30, "½", "٣")),
        ),
        max_size=6,
    )
)
def test_any_form_is_an_object_or_an_invalid_request(items: list[tuple[str, str]]) -> None:
    with contextlib.suppress(InvalidRequest):
        body = parse_form([*items, ("steps", "8")], NUMERIC)
        assert body["steps"] == 8
        assert sum(1 for _ in _leaves(body)) == len(items) + 1


def _leaves(value: Any) -> Any:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _leaves(inner)
    else:
        yield value


def _floats(value: Any) -> list[float]:
    return [leaf for leaf in _leaves(value) if isinstance(leaf, float)]
