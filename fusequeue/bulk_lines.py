"""The bodies of many jobs as the lines of bulk requests."""

import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from fusequeue.arguments import json_text, key, mapping
from fusequeue.errors import InvalidArgument

LINES_PER_REQUEST = 1_000


@dataclass(frozen=True)
class BulkLines:
    """The lines of one request: `texts` by line from 1, of `count` lines, of which the first is the `first` of all.

    `name` is the request's Idempotency-Key.
    """

    texts: dict[int, str]
    count: int
    first: int
    name: str


def bulk_lines(bodies: Iterable[Mapping[str, Any] | None], idempotency_key: str | None) -> Iterator[BulkLines]:
    """Yield the lines of each request; `bodies` is consumed lazily, in the calling thread."""
    if isinstance(bodies, Mapping | str | bytes) or not isinstance(bodies, Iterable):
        raise InvalidArgument(f"bodies: {bodies!r:.80} is not a list of bodies")
    name, lines, first = key(idempotency_key, uuid.uuid4().hex), iter(bodies), 1
    while chunk := list(islice(lines, LINES_PER_REQUEST)):
        texts = {
            at: json_text(mapping(f"bodies.{first + at - 2}", body), f"bodies.{first + at - 2}.")
            for at, body in enumerate(chunk, 1)
            if body is not None
        }
        yield BulkLines(texts, len(chunk), first, f"{name}-{first}")
        first += len(chunk)
