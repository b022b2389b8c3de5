"""Keys of the lines of a bulk request, by which later lines name the jobs of earlier ones."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from api.context import JOB_ID
from api.errors import ParentRefused, ParentRefusedForNow
from shared.errors import FusequeueError, InvalidRequest

_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_IMAGES = ("image", "mask", "last_image", "video", "face_video", "audio")


@dataclass(frozen=True)
class JobLine:
    """A line of a bulk request: its decoded `body` without its key, the keys that it names, and what is wrong with
    these."""

    number: int
    raw: bytes
    body: Any
    key: str | None = None
    parents: frozenset[str] = frozenset()
    faults: tuple[InvalidRequest, ...] = ()


@dataclass
class _KeyedLine:
    """The line of a key; once known, the id of its job, or why it was refused and whether it can be sent again."""

    number: int
    job: str = ""
    refusal: str = ""
    retryable: bool = False


class LineKeys:
    """The keys of one request. A line can name those of the lines before it."""

    def __init__(self) -> None:
        self._lines: dict[str, _KeyedLine] = {}

    def read(self, number: int, raw: bytes, body: Any) -> JobLine:
        """Return the next line, whose key later lines can name. A body of a job is changed: it loses its key."""
        if not isinstance(body, dict):
            return JobLine(number, raw, body)
        faults: list[InvalidRequest] = []
        parents = set()
        for param, holder, at in _named(body):
            if holder[at] in self._lines:
                parents.add(holder[at])
            else:
                message = f"{param}: no line before this one has the key {holder[at][:80]!r}; name one, or a job's id"
                faults.append(InvalidRequest(message, param=param))
        key, fault = self._add(body.pop("key"), number) if "key" in body else (None, None)
        faults += [] if fault is None else [fault]
        return JobLine(number, raw, body, key, frozenset(parents), tuple(faults))

    def _add(self, key: Any, number: int) -> tuple[str | None, InvalidRequest | None]:
        """Return the key of a line, or what is wrong with it."""
        if not isinstance(key, str) or not _KEY.fullmatch(key) or JOB_ID.fullmatch(key):
            message = (
                "key: it must be 1 to 64 letters, digits, '.', '-' and '_', a letter or digit first, and no job's id"
            )
            return None, InvalidRequest(message, param="key")
        if (known := self._lines.setdefault(key, _KeyedLine(number))).number != number:
            return None, InvalidRequest(f"key: line {known.number} has it too: {key}; use another", param="key")
        return key, None

    def name_jobs(self, line: JobLine) -> None:
        """Replace the keys in a body by the ids of their jobs; raises `ParentRefused` if one has none."""
        for param, holder, at in _named(line.body) if line.parents else ():
            parent = self._lines.get(holder[at])
            if parent is None:
                continue  # one of the line's faults
            if parent.refusal:
                raise _refused(param, holder[at], parent)
            holder[at] = parent.job

    def settle(self, line: JobLine, job: str | FusequeueError) -> None:
        """Note the job of a line, or why it was refused; of a chain, with the reason of its first line."""
        if line.key is None:
            return
        keyed = self._lines[line.key]
        if isinstance(job, str):
            keyed.job = job
        else:  # not the error itself, whose traceback takes kilobytes
            keyed.refusal = job.reason if isinstance(job, ParentRefused) else job.public
            keyed.retryable = job.retryable


def _named(body: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield where a body names a job by another text than its id: the field, what holds the text, and its place."""
    for param, holder, at in _job_names(body):
        if isinstance(holder[at], str) and not JOB_ID.fullmatch(holder[at]):
            yield param, holder, at


def _job_names(body: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield where a body names jobs: in `after`, and in objects in place of images."""
    for at in range(len(_list(body, "after"))):
        yield f"after.{at}", body["after"], at
    images = {name: body.get(name) for name in _IMAGES}
    images |= {f"images.{at}": image for at, image in enumerate(_list(body, "images"))}
    controls = enumerate(_list(body, "controls"))
    images |= {f"controls.{at}.image": one.get("image") for at, one in controls if isinstance(one, dict)}
    for param, image in images.items():
        if isinstance(image, dict) and "job" in image:
            yield param, image, "job"


def _list(body: dict[str, Any], name: str) -> list[Any]:
    """Return a list of a body; what is none is a fault of the field."""
    return value if isinstance(value := body.get(name), list) else []


def _refused(param: str, key: str, parent: _KeyedLine) -> ParentRefused:
    """Return the error of a line that names a refused one."""
    kind = ParentRefusedForNow if parent.retryable else ParentRefused
    return kind(
        f"{param}: line {parent.number}, {key}, was refused: {parent.refusal}", param=param, reason=parent.refusal
    )
