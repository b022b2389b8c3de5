"""OpenAI batches: thousands of requests in one file, which run in the slots that other jobs leave free."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Any, Literal, TypeAlias

from pydantic import Field, SkipValidation, TypeAdapter

from fusequeue.arguments import json_text, mapping, path_of, seconds
from fusequeue.errors import ClientError, InvalidArgument
from fusequeue.response_types import Created, Resource
from fusequeue.transport import Transport, parsed

PATH = "/v1/batches"
POLL_S = 1.0
BatchState: TypeAlias = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
BatchEndpoint: TypeAlias = Literal["/v1/jobs", "/v1/images/generations", "/v1/images/edits", "/v1/videos"]
ENDED = frozenset({"failed", "completed", "expired", "cancelled"})


class RequestCounts(Resource):
    """Requests of a batch, and those that have ended with a result or an error."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchError(Resource):
    """Why the file of a batch is rejected; `line` counts from 1, None: the file as a whole."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(Resource):
    """Why the file of a batch is rejected."""

    data: tuple[BatchError, ...] = ()


class Batch(Resource):
    """A batch; times are in seconds since the epoch."""

    id: str
    endpoint: str
    status: SkipValidation[BatchState]
    errors: BatchErrors | None = None
    input_file_id: str
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    expires_at: int | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    metadata: dict[str, str] | None = None

    @property
    def ended(self) -> bool:
        """Whether the state is final."""
        return self.status in ENDED


class BatchResponse(Resource):
    """The response to one request of a batch."""

    status_code: int
    request_id: str | None = None
    body: dict[str, Any] = Field(default_factory=dict)


class BatchFailure(Resource):
    """Why a request of a batch has no response."""

    code: str
    message: str


class BatchResult(Resource):
    """The result of one request of a batch: the `response`, or the `error` of one that had none."""

    id: str
    custom_id: str
    response: BatchResponse | None = None
    error: BatchFailure | None = None


RESULT = TypeAdapter(BatchResult)


class BatchTimeout(ClientError):
    """A batch has not ended in time; it continues."""

    def __init__(self, batch: Batch, waited_s: float) -> None:
        super().__init__(f"batch {batch.id} is {batch.status} after {waited_s:g} s; it continues")
        self.batch = batch


class AsyncBatches:
    """The batches of a service: `client.batches`."""

    def __init__(self, http: Transport) -> None:
        self._http = http

    async def create(
        self,
        bodies: Iterable[Mapping[str, Any]],
        *,
        endpoint: BatchEndpoint = "/v1/jobs",
        metadata: Mapping[str, str] | None = None,
    ) -> Batch:
        """Create a batch of requests with these bodies; the `custom_id` of each is its number, from 0."""
        file = {"file": ("batch.jsonl", await asyncio.to_thread(_lines, bodies, endpoint))}
        purpose = {"purpose": "batch"}
        uploaded = await self._http.read(Created, "POST", "/v1/files", files=file, data=purpose, headers=_key())
        body: dict[str, Any] = {"input_file_id": uploaded.id, "endpoint": endpoint, "completion_window": "24h"}
        if metadata is not None:
            body["metadata"] = metadata
        return await self._http.read(Batch, "POST", PATH, json=body, headers=_key())

    async def get(self, batch: Batch | str) -> Batch:
        """Return a batch as it is now."""
        return await self._http.read(Batch, "GET", path_of(PATH, batch))

    def list(self, *, limit: int | None = None) -> AsyncGenerator[Batch]:
        """Yield batches, newest first, up to `limit`."""
        return self._http.pages(Batch, PATH, limit)

    async def cancel(self, batch: Batch | str) -> Batch:
        """Cancel a batch; finished results are kept."""
        return await self._http.read(Batch, "POST", path_of(PATH, batch, "/cancel"))

    async def wait(self, batch: Batch | str, *, timeout_s: float | None = 86_400.0) -> Batch:
        """Return the batch once it has ended in any state; raises `BatchTimeout` after `timeout_s`, None: never."""
        limit_s, start = seconds("timeout_s", timeout_s), time.monotonic()
        while not (current := await self.get(batch)).ended:
            left_s = limit_s - (time.monotonic() - start)
            if left_s <= 0:
                raise BatchTimeout(current, limit_s)
            await asyncio.sleep(min(POLL_S, left_s))
        return current

    async def results(self, batch: Batch | str) -> AsyncGenerator[BatchResult]:
        """Yield the result of each request of an ended batch: those with a response first, then those that failed."""
        ended = await self.get(batch)
        if not ended.ended:
            raise ValueError(f"batch {ended.id} is still {ended.status}")
        for file_id in (ended.output_file_id, ended.error_file_id):
            if file_id is not None:
                content = (await self._http.send("GET", path_of("/v1/files", file_id, "/content"))).content
                for line in content.splitlines():
                    yield parsed(RESULT, line)


def _key() -> dict[str, str]:
    """Return the header of a request that can be repeated; the service keeps one body for each key."""
    return {"Idempotency-Key": uuid.uuid4().hex}


def _lines(bodies: Iterable[Mapping[str, Any]], endpoint: str) -> bytes:
    if isinstance(bodies, Mapping | str | bytes) or not isinstance(bodies, Iterable):
        raise InvalidArgument(f"bodies: {bodies!r:.80} is not a list of bodies")
    return "".join(_line(at, body, endpoint) for at, body in enumerate(bodies)).encode()


def _line(at: int, body: Mapping[str, Any], endpoint: str) -> str:
    text = json_text(mapping(f"bodies.{at}", body), f"bodies.{at}.")
    return f'{{"custom_id":"{at}","method":"POST","url":{json.dumps(endpoint)},"body":{text}}}\n'
