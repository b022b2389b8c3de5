"""The bodies of many jobs as the lines of bulk requests."""

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from fusequeue.arguments import json_text, key, mapping
from fusequeue.errors import InvalidArgument
from fusequeue.image_sources import IMAGE_FIELDS
from fusequeue.response_types import LineFailure, LineResult

LINES_PER_REQUEST = 1_000
MAX_KEYS = 100_000
"""Keys that later bodies can name: as many as a request of the service has lines."""


@dataclass(frozen=True)
class BulkLines:
    """The lines of one request: `texts` by line from 1, of `count` lines, of which the first is the `first` of all.

    `name` is the request's Idempotency-Key. `keyed` are the lines with a key, `refused` those that are not sent, as
    they name a refused line of an earlier request.
    """

    count: int
    first: int
    name: str
    texts: dict[int, str] = field(default_factory=dict)
    keyed: set[int] = field(default_factory=set)
    refused: dict[int, LineResult] = field(default_factory=dict)


class BulkRequests:
    """The requests for bodies, which are consumed lazily, in the calling thread.

    Bodies name earlier ones by key. For those of earlier requests, `note` their results before the next request.
    """

    def __init__(self, bodies: Iterable[Mapping[str, Any] | None], idempotency_key: str | None) -> None:
        if isinstance(bodies, Mapping | str | bytes) or not isinstance(bodies, Iterable):
            raise InvalidArgument(f"bodies: {bodies!r:.80} is not a list of bodies")
        self._name = key(idempotency_key, uuid.uuid4().hex)
        self._bodies = iter(bodies)
        self._keyed: dict[str, LineResult] = {}

    def __iter__(self) -> Iterator[BulkLines]:
        first = 1
        while chunk := list(islice(self._bodies, LINES_PER_REQUEST)):
            lines = BulkLines(len(chunk), first, f"{self._name}-{first}")
            for at, body in enumerate(chunk, 1):
                if body is not None:
                    self._add(lines, at, mapping(f"bodies.{first + at - 2}", body))
            yield lines
            first += len(chunk)

    def note(self, results: Iterable[LineResult]) -> None:
        """Keep the results of lines with a key, which later bodies can name."""
        self._keyed |= {result.key: result for result in results if result.key is not None}
        for oldest in list(islice(self._keyed, max(0, len(self._keyed) - MAX_KEYS))):
            del self._keyed[oldest]

    def _add(self, lines: BulkLines, at: int, body: Mapping[str, Any]) -> None:
        where, name = f"bodies.{lines.first + at - 2}.", body.get("key")
        if name is not None:
            lines.keyed.add(at)
        if isinstance(name, str) and (known := self._keyed.get(name)) is not None:
            raise InvalidArgument(f"{where}key: bodies.{known.line - 1} has it too: {name!r:.80}")
        refusals: list[LineFailure] = []

        def job_of(param: str, job: Any) -> Any:
            parent = self._keyed.get(job) if isinstance(job, str) else None
            if parent is not None and parent.error is not None:
                refusals.append(_refusal(param, parent, parent.error))
            return job if parent is None or parent.id is None else parent.id

        text = json_text(with_jobs(body, job_of) if self._keyed else body, where)
        if refusals:
            lines.refused[at] = LineResult(line=at, key=name if isinstance(name, str) else None, error=refusals[0])
        else:
            lines.texts[at] = text


def _refusal(param: str, parent: LineResult, error: LineFailure) -> LineFailure:
    """Return the error of a line that names a refused one, as the service has it for lines of one request."""
    message = f"{param}: line {parent.line}, {parent.key}, was refused: {error.message}"
    return LineFailure(code="parent_refused", message=message, param=param, status=422, retryable=error.retryable)


def with_jobs(body: Mapping[str, Any], job_of: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Return a body in which each name of a job is the one that `job_of` returns for its field and the name."""

    def image(param: str, value: Any) -> Any:
        return {**value, "job": job_of(param, value["job"])} if isinstance(value, Mapping) and "job" in value else value

    def control(param: str, value: Any) -> Any:
        named = isinstance(value, Mapping) and "image" in value
        return {**value, "image": image(f"{param}.image", value["image"])} if named else value

    changed = {name: image(name, value) if name in IMAGE_FIELDS else value for name, value in body.items()}
    for name, replaced in (("after", job_of), ("images", image), ("controls", control)):
        if isinstance(body.get(name), list | tuple):
            changed[name] = [replaced(f"{name}.{at}", value) for at, value in enumerate(body[name])]
    return changed
