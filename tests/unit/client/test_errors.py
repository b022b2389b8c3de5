"""Errors of the client: they name the field once, have all faults, and come before anything is sent."""

from __future__ import annotations

import math
import pickle
from collections.abc import Awaitable, Callable
from types import MappingProxyType
from typing import Any

import httpx
import pytest
from harness import canned

from fusequeue import (
    AsyncClient,
    ClientError,
    FieldError,
    Invalid,
    InvalidArgument,
    Job,
    JobFailed,
    NotFound,
    RefusedError,
    UnexpectedResponse,
    Unreachable,
    WaitTimeout,
)

PROMPT = "a red circle on a blue ground, left"
FAILURE = {"code": "input_missing", "message": "image: it was deleted", "param": "image"}
JOB = {**canned.JOB, "status": "failed", "error": FAILURE}


def client(handler: Callable[[httpx.Request], httpx.Response], **options: Any) -> AsyncClient:
    return AsyncClient("http://api.test", transport=httpx.MockTransport(handler), retries=0, **options)


def unsent(request: httpx.Request) -> httpx.Response:
    raise AssertionError(f"sent: {request.method} {request.url}")


@pytest.mark.parametrize(
    ("field", "message", "expected"),
    [
        (None, "the body is not valid JSON", "the body is not valid JSON"),
        ("steps", "steps: it must be a whole number", "steps: it must be a whole number"),
        ("steps", "steps must be 1 to 100, not 900", "steps must be 1 to 100, not 900"),
        ("mask", "inpaint takes no mask", "inpaint takes no mask"),
        ("steps", "at least 1", "steps: at least 1"),
        ("n", "an image too many", "n: an image too many"),  # `n` occurs in other words only
        ("id", "controls.0.id: unknown", "id: controls.0.id: unknown"),
        ("image", "the images are too many", "image: the images are too many"),
        ("images.1", "images: it is empty", "images.1: images: it is empty"),
        ("images", "images.1: it is empty", "images: images.1: it is empty"),
        ("controls.0.id", "controls.0.id: unknown", "controls.0.id: unknown"),
    ],
)
def test_a_fault_names_its_field_once(field: str | None, message: str, expected: str) -> None:
    assert str(FieldError(field, message)) == expected


async def test_an_error_has_all_faults_of_a_body(api: AsyncClient) -> None:
    wrong: dict[str, Any] = {"steps": 0, "width": "64", "stpes": 8, "metadata": {"order": 7}}
    with pytest.raises(Invalid) as caught:
        await api.submit("demo", PROMPT, **wrong)
    error = caught.value
    assert {fault.field for fault in error.errors} == {"steps", "width", "stpes", "metadata.order"}
    assert (error.param, error.message) == (error.errors[0].field, error.errors[0].message)
    assert (error.status, error.code) == (422, "invalid_request")
    assert [str(error).count(name) for name in ("steps", "width", "stpes", "metadata.order")] == [1, 1, 1, 1]


async def test_an_error_about_one_field_names_it_once(api: AsyncClient) -> None:
    for wrong, name in (({"steps": 900}, "steps"), ({"frames": 5}, "frames"), ({"scheduler": "x"}, "scheduler")):
        arguments: dict[str, Any] = wrong
        with pytest.raises(Invalid) as caught:
            await api.submit("demo", PROMPT, **arguments)
        assert (caught.value.param, str(caught.value).count(name)) == (name, 1), str(caught.value)


async def test_a_line_of_a_bulk_submit_has_all_its_faults(api: AsyncClient) -> None:
    bodies = [{"model": "demo", "prompt": PROMPT}, {"model": "demo", "prompt": PROMPT, "steps": 0, "n": 0}]
    good, bad = [line async for line in api.submit_many(bodies)]
    assert good.error is None
    assert bad.error is not None
    assert [fault.param for fault in bad.error.errors] == ["steps", "n"]
    assert bad.error.param == "steps"


def test_a_failed_job_names_its_field_once() -> None:
    with pytest.raises(JobFailed) as caught:
        Job.model_validate(JOB).require_success()
    assert str(caught.value) == "job job_1 failed: image: it was deleted (input_missing)"


CALLS: dict[str, Callable[[AsyncClient], Awaitable[object]]] = {
    "guidance_scale: it cannot be sent": lambda api: api.submit("m", "x", seed=1, guidance_scale=math.nan),
    "extra: it cannot be sent": lambda api: api.submit("m", "x", extra_body={"extra": {1, 2}}),
    "extra_body: 5 has no names": lambda api: api.submit("m", "x", extra_body=5),  # type: ignore[arg-type]
    "idempotency_key: ''": lambda api: api.submit("m", "x", idempotency_key=""),
    "idempotency_key: 'ä'": lambda api: api.submit("m", "x", idempotency_key="ä"),
    "idempotency_key: 'a\\nb'": lambda api: anext(api.submit_many([{}], idempotency_key="a\nb")),
    "bodies: {} is not a list": lambda api: anext(api.submit_many({})),  # type: ignore[arg-type]
    "bodies.1.image: it cannot be sent": lambda api: anext(api.submit_many([{}, {"image": b"png"}])),
    "bodies.2: 'x' has no names": lambda api: anext(api.submit_many([{}, None, "x"])),  # type: ignore[list-item]
    "bodies: 'x' is not a list": lambda api: api.batches.create("x"),  # type: ignore[arg-type]
    "bodies: {'model': 'm'} is not a list": lambda api: api.batches.create({"model": "m"}),  # type: ignore[arg-type]
    "bodies.0.steps: it cannot be sent": lambda api: api.batches.create([{"steps": math.inf}]),
    "limit: -1": lambda api: anext(api.jobs(limit=-1)),
    "limit: '5'": lambda api: anext(api.webhooks.deliveries(limit="5")),  # type: ignore[arg-type]
    "metadata: 'x' has no names": lambda api: anext(api.jobs(metadata="x")),  # type: ignore[arg-type]
    "folder: 5 is not a path": lambda api: api.download("job_1", 5),  # type: ignore[arg-type]
    "invalid id: 5": lambda api: api.get(5),  # type: ignore[arg-type]
    "invalid id: None": lambda api: api.wait(None),  # type: ignore[arg-type]
    "invalid id: '..'": lambda api: api.delete(".."),
    "invalid id: ''": lambda api: api.batches.get(""),
}


@pytest.mark.parametrize("message", CALLS)
async def test_an_argument_that_cannot_be_sent_is_refused_by_name(message: str) -> None:
    async with client(unsent) as api:
        with pytest.raises(InvalidArgument) as caught:
            await CALLS[message](api)
    assert str(caught.value).startswith(message)
    assert isinstance(caught.value, ClientError)


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("invalid URL of the service: 'ftp://host'", {"base_url": "ftp://host"}),
        ("invalid URL of the service: 5", {"base_url": 5}),
        ("invalid URL of the service: 'http://host/v1/'; leave out /v1", {"base_url": "http://host/v1/"}),
        ("invalid API key", {"api_key": "a\nb"}),
        ("retries: -1", {"retries": -1}),
        ("retries: '5'", {"retries": "5"}),
        ("timeout_s: nan", {"timeout_s": math.nan}),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_name(message: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        AsyncClient(**arguments)
    assert str(caught.value).startswith(message)


async def test_mappings_and_sequences_of_other_types_are_sent(api: AsyncClient) -> None:
    metadata = MappingProxyType({"order": "7"})
    job = await api.submit("demo", PROMPT, metadata=metadata, webhook_events=range(0) or None)
    assert job.metadata == metadata
    (line,) = [line async for line in api.submit_many([MappingProxyType({"model": "demo", "prompt": PROMPT})])]
    assert line.id is not None
    assert [one.id async for one in api.jobs(metadata=metadata, status=("queued",))] == [job.id]


async def test_the_key_is_sent_to_the_service_only() -> None:
    """The URL of an image can be on any host."""
    sent: dict[str, str | None] = {}

    def handler(request: httpx.Request) -> httpx.Response:
        sent[str(request.url)] = request.headers.get("authorization")
        return httpx.Response(200, content=b"png")

    urls = ["/v1/jobs/job_1/artifacts/0", "http://api.test/v1/x", "http://other.test/x", "https://api.test/x"]
    async with client(handler, api_key="secret") as api:
        for url in urls:
            assert await api.read(url) == b"png"
    assert list(sent.values()) == ["Bearer secret", "Bearer secret", None, None]


@pytest.mark.parametrize(
    ("response", "call", "message"),
    [
        (httpx.Response(200, text="<html>"), lambda api: api.get("job_1"), "check the URL"),
        (httpx.Response(200, json={"id": "job_1"}), lambda api: api.get("job_1"), r"the first: status: Field required"),
        (httpx.Response(301, headers={"Location": "https://b.test/"}), lambda api: api.get("job_1"), "https://b.test/"),
        (httpx.Response(307, headers={"Location": "/x"}), lambda api: api.read("/v1/x"), "redirects to /x"),
        (httpx.Response(200, text="<html>"), lambda api: anext(api.submit_many([{}])), "faults, the first"),
        (httpx.Response(200, text="<html>"), lambda api: anext(api.events("job_1")), "no event stream"),
        (
            httpx.Response(200, text="data: 5\n\n", headers={"Content-Type": "text/event-stream"}),
            lambda api: anext(api.events("job_1")),
            "an event cannot be read",
        ),
        (
            httpx.Response(200, text="data: <\n\n", headers={"Content-Type": "text/event-stream"}),
            lambda api: anext(api.events("job_1")),
            "an event cannot be read",
        ),
    ],
)
async def test_a_response_of_something_else_is_an_error(
    response: httpx.Response, call: Callable[[AsyncClient], Awaitable[object]], message: str
) -> None:
    async with client(lambda _: response) as api:
        with pytest.raises(UnexpectedResponse, match=message):
            await call(api)


async def test_a_body_that_cannot_be_decompressed_is_an_error() -> None:
    broken = {"Content-Encoding": "gzip"}
    async with client(lambda _: httpx.Response(200, stream=httpx.ByteStream(b"no gzip"), headers=broken)) as api:
        with pytest.raises(Unreachable):
            await api.get("job_1")


async def test_a_bulk_submit_that_breaks_off_says_why() -> None:
    row = {"line": None, "error": {"code": "overloaded", "message": "no memory for the body", "retryable": True}}
    async with client(lambda _: httpx.Response(200, json=row)) as api:
        with pytest.raises(Unreachable, match=r"2 of 2 lines got no response: no memory for the body"):
            await anext(api.submit_many([{}, None, {}]))


def test_errors_can_be_copied_to_another_process() -> None:
    """As a pool of processes does."""
    job = Job.model_validate(JOB)
    errors: list[Any] = [JobFailed(job), WaitTimeout(job, 5), Unreachable("no"), InvalidArgument("limit: 5")]
    errors.append(NotFound("no job", status=404, code="not_found", param="id", request_id="req_1"))
    for error in errors:
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))
    assert isinstance(errors[-1], RefusedError)
