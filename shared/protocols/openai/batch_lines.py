"""The lines of a batch: what each asks for, and how it is answered."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.config.models_file import Catalog
from shared.errors import FusequeueError, InvalidRequest
from shared.job import JobRecord, State
from shared.protocols.native import job_object
from shared.protocols.openai.batches import Batch, BatchError, job_id
from shared.protocols.openai.images import created_s, parse_image_request, response_fields, usage
from shared.protocols.openai.videos import parse_video_request, video_object
from shared.request import JobRequest, parse
from shared.runtime import strict_json
from shared.storage import Storage

JOBS = "/v1/jobs"
GENERATIONS = "/v1/images/generations"
EDITS = "/v1/images/edits"
VIDEOS = "/v1/videos"
ENDPOINTS = (GENERATIONS, EDITS, VIDEOS, JOBS)
MAX_CUSTOM_ID_CHARS = 512
MAX_ERRORS = 100
"""Of one file that are told; the first ones."""


@dataclass(frozen=True)
class BatchLine:
    """One line: `ordinal` counts from 1 those that are not blank."""

    ordinal: int
    custom_id: str
    body: dict[str, Any]


class LineChecker:
    """Looks at the lines of a file for what makes it useless as a whole; it keeps a digest of each custom_id."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._seen: set[bytes] = set()
        self.total = 0
        self.errors: list[BatchError] = []

    def take(self, number: int, raw: bytes | None) -> None:
        """Look at line `number` of the file, None where it is too long."""
        self.total += 1
        fault = self._fault(raw)
        if fault is not None and len(self.errors) < MAX_ERRORS:
            code, message, param = fault
            self.errors.append(BatchError(code=code, message=message, line=number, param=param))

    def _fault(self, raw: bytes | None) -> tuple[str, str, str | None] | None:
        if raw is None:
            return "line_too_long", "the line is longer than a request's body may be", None
        try:
            line = strict_json.decode(raw)
        except InvalidRequest as error:
            return "invalid_json_line", error.message, error.param
        if not isinstance(line, dict):
            return "invalid_json_line", "a line must be a JSON object", None
        custom_id = line.get("custom_id")
        if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID_CHARS:
            words = f"custom_id must be a text of 1 to {MAX_CUSTOM_ID_CHARS} characters"
            return "missing_required_parameter", words, "custom_id"
        if line.get("method") != "POST":
            return "invalid_method", "method must be POST", "method"
        if line.get("url") != self._endpoint:
            return "mismatched_url", f"url must be the batch's endpoint, {self._endpoint}", "url"
        if not isinstance(line.get("body"), dict):
            return "missing_required_parameter", "body must be a JSON object", "body"
        digest = hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if digest in self._seen:
            return "duplicate_custom_id", "another line has the same custom_id", "custom_id"
        self._seen.add(digest)
        return None


def parse_line(ordinal: int, raw: bytes) -> BatchLine:
    """Return a line of a file that has been checked."""
    line = strict_json.decode(raw)
    return BatchLine(ordinal, line["custom_id"], line["body"])


def line_request(endpoint: str, body: dict[str, Any], catalog: Catalog) -> JobRequest:
    """Return the job that the body of a line asks for, or raise `InvalidRequest`."""
    if endpoint == JOBS:
        return parse(body)
    if endpoint == VIDEOS:
        return parse_video_request(body, catalog)
    pictures = parse_image_request(body, catalog, "image_edit" if endpoint == EDITS else "image_generation")
    request = pictures.request
    if endpoint == EDITS and request.image is None and request.images is None:
        raise InvalidRequest("image: an edit needs one", param="image")
    if pictures.fields.stream:
        raise InvalidRequest("stream: the lines of a batch are answered in a file", param="stream")
    return request


def failed_line(batch: Batch, line: BatchLine, error: FusequeueError) -> bytes:
    """Return the line of the error file for a line that became no job."""
    return _line(batch, line, None, {"code": error.code, "message": error.message, "param": error.param})


def error_line(batch: Batch, line: BatchLine, code: str, message: str) -> bytes:
    """Return the line of the error file for a line without a result."""
    return _line(batch, line, None, {"code": code, "message": message, "param": None})


def ended_badly(batch: Batch, line: BatchLine, record: JobRecord) -> bytes:
    """Return the line of the error file for a job that gave nothing."""
    if record.error is not None:
        told = record.error.model_dump(mode="json")
        return _line(batch, line, None, {name: told[name] for name in ("code", "message", "param")})
    if record.state is State.EXPIRED:
        return error_line(batch, line, "batch_expired", "its turn did not come in time")
    return error_line(batch, line, f"job_{record.state.value}", f"job {record.job.id} was {record.state.value}")


async def result_line(batch: Batch, line: BatchLine, record: JobRecord, storage: Storage) -> bytes:
    """Return the line of the output file for a job that succeeded; raises `NotFound` for pictures that are gone.

    Pictures are told by URLs, which want a key where one is asked for, unless `response_format` is `b64_json`.
    """
    body: Mapping[str, Any]
    if batch.endpoint == JOBS:
        body = job_object(record, batch.base_url).model_dump(mode="json")
    elif batch.endpoint == VIDEOS:
        body = video_object(record)
    else:
        body = await _pictures(batch, line, record, storage)
    return _line(batch, line, {"status_code": 200, "request_id": record.job.id, "body": body}, None)


async def _pictures(batch: Batch, line: BatchLine, record: JobRecord, storage: Storage) -> dict[str, Any]:
    in_file = line.body.get("response_format") == "b64_json"
    data = []
    for artifact in record.artifacts:
        told: dict[str, Any] = {"revised_prompt": None, "seed": artifact.seed, "flagged": artifact.flagged}
        if in_file:
            told["b64_json"] = base64.b64encode(await storage.read(artifact.key)).decode("ascii")
        else:
            told["url"] = f"{batch.base_url}/v1/jobs/{record.job.id}/artifacts/{artifact.index}"
        data.append(told)
    return {
        "id": record.job.id,
        "created": created_s(record),
        "data": data,
        **response_fields(record.job, line.body.get("quality")),
        "usage": usage(record.job),
    }


def _line(batch: Batch, line: BatchLine, response: Mapping[str, Any] | None, error: Mapping[str, Any] | None) -> bytes:
    told = {
        "id": job_id(batch, line.ordinal).replace("job_", "batch_req_"),
        "custom_id": line.custom_id,
        "response": response,
        "error": error,
    }
    return json.dumps(told, separators=(",", ":")).encode() + b"\n"
