"""Lines of a batch: requests of the input file, responses of the output file, errors of the error file."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from api import strict_json
from api.jobs.job_object import job_object
from api.jobs.request import JobRequest, parse
from api.protocols.base64_images import read_base64
from api.protocols.openai.batches.batch_steps import line_job_id
from api.protocols.openai.image_requests import (
    has_base64,
    image_data,
    images_object,
    parse_image_request,
    require_image,
)
from api.protocols.openai.server_fields import own_fields
from api.protocols.openai.video_requests import parse_video_request, video_object
from shared.batch import Batch, BatchError
from shared.config.catalog import Catalog
from shared.errors import InvalidRequest
from shared.job import State
from shared.job_record import JobRecord
from shared.storage import Storage

JOBS = "/v1/jobs"
GENERATIONS = "/v1/images/generations"
EDITS = "/v1/images/edits"
VIDEOS = "/v1/videos"
Sign = Callable[[JobRecord, int | Literal["events"]], str]
"""Returns the query with which the URL of an image of a job needs no key; "" where none is needed."""

MAX_ERRORS = 100
"""Reported errors of one file: the first ones."""


@dataclass(frozen=True)
class BatchLine:
    """One request; `ordinal` counts the non-blank lines from 1.

    The body is decoded when it is used: decoded, a line can take twenty times the memory of `raw`.
    """

    ordinal: int
    custom_id: str
    raw: bytes

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = strict_json.decode(self.raw)["body"]
        return body


class LineChecker:
    """Validates the lines of a file; keeps a digest of each custom_id to find duplicates."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._custom_ids: set[bytes] = set()
        self.total = 0
        self.errors: list[BatchError] = []

    def check(self, number: int, raw: bytes | None) -> None:
        """Check line `number` of the file; `raw` is None for a line that is too long."""
        self.total += 1
        error = self._error(raw)
        if error is not None and len(self.errors) < MAX_ERRORS:
            code, message, param = error
            self.errors.append(BatchError(code=code, message=message, line=number, param=param))

    def _error(self, raw: bytes | None) -> tuple[str, str, str | None] | None:
        if raw is None:
            return "line_too_long", "the line is longer than the maximum size of a request body", None
        try:
            line = strict_json.decode(raw)
        except InvalidRequest as error:
            return "invalid_json_line", error.message, error.param
        if not isinstance(line, dict):
            return "invalid_json_line", "a line must be a JSON object", None
        custom_id = line.get("custom_id")
        if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= 512:
            message = "custom_id must be a string of 1 to 512 characters"
            return "missing_required_parameter", message, "custom_id"
        if line.get("method") != "POST":
            return "invalid_method", "method must be POST", "method"
        if line.get("url") != self._endpoint:
            return "mismatched_url", f"url must be the batch's endpoint, {self._endpoint}", "url"
        if not isinstance(line.get("body"), dict):
            return "missing_required_parameter", "body must be a JSON object", "body"
        digest = hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if digest in self._custom_ids:
            return "duplicate_custom_id", "another line has the same custom_id", "custom_id"
        self._custom_ids.add(digest)
        return None


def parse_line(ordinal: int, raw: bytes) -> BatchLine:
    """Return a line that has passed `LineChecker`."""
    return BatchLine(ordinal, strict_json.decode(raw)["custom_id"], raw)


def line_request(endpoint: str, body: dict[str, Any], catalog: Catalog) -> JobRequest:
    """Return the job request of a line's body, or raise `InvalidRequest`."""
    if endpoint == JOBS:
        return parse(body)
    if endpoint == VIDEOS:
        return parse_video_request(body, catalog).request
    parsed = parse_image_request(body, catalog, "image_edit" if endpoint == EDITS else "image_generation")
    if endpoint == EDITS:
        require_image(parsed.request)
    if parsed.fields.stream:
        raise InvalidRequest("stream: not supported in a batch", param="stream")
    return parsed.request


def error_line(batch: Batch, line: BatchLine, code: str, message: str, param: str | None = None) -> bytes:
    """Return a line of the error file."""
    return _encode(batch, line, None, {"code": code, "message": message, "param": param})


def failed_line(batch: Batch, line: BatchLine, record: JobRecord) -> bytes:
    """Return the error line of a job that ended without success."""
    if record.state is State.EXPIRED and record.started_at_ms is None:
        return error_line(batch, line, "batch_expired", "the job did not start before the batch expired")
    if record.error is not None:
        return error_line(batch, line, record.error.code, record.error.message, record.error.param)
    return error_line(batch, line, f"job_{record.state.value}", f"job {record.job.id} was {record.state.value}")


async def result_line(batch: Batch, line: BatchLine, record: JobRecord, storage: Storage, sign: Sign) -> bytes:
    """Return the output line of a job that succeeded; raises `NotFound` when an image was deleted.

    Its body is that of a synchronous call: images are as its `response_format` says.
    """
    body: Mapping[str, Any]

    def query(job_id: str, part: int | Literal["events"]) -> str:
        return sign(record, part)

    if batch.endpoint == JOBS:
        body = job_object(record, batch.base_url, sign=query).model_dump(mode="json")
    elif batch.endpoint == VIDEOS:
        body = video_object(record)
    else:
        fields, warnings = own_fields(line.body())
        response_format, quality = fields.get("response_format"), fields.get("quality")
        del fields
        encoded = has_base64(response_format)
        images = [await read_base64(storage, artifact.key) for artifact in record.artifacts if encoded]
        data = image_data(record, images, batch.base_url, response_format=response_format, sign=query)
        body = images_object(record, data, quality, warnings)
    return _encode(batch, line, {"status_code": 200, "request_id": record.job.id, "body": body}, None)


def _encode(batch: Batch, line: BatchLine, response: Mapping[str, Any] | None, error: dict[str, Any] | None) -> bytes:
    wire = {
        "id": line_job_id(batch, line.ordinal).replace("job_", "batch_req_"),
        "custom_id": line.custom_id,
        "response": response,
        "error": error,
    }
    return json.dumps(wire, separators=(",", ":")).encode() + b"\n"
