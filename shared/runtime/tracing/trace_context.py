"""W3C Trace Context: where a trace stands, as the headers `traceparent` and `tracestate` carry it."""

import re
from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MAX_STATE_CHARS = 512
MAX_STATE_MEMBERS = 32

# Later versions may append fields after a dash; version ff is invalid, and so are ids of zeros.
_HEADER = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[\x21-\x7e]*)?")
_PARENT = r"^00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$"
_STATE_MEMBER = re.compile(r"[a-z0-9][a-z0-9_\-*/@]{0,255}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{1,256}")


class TraceContext(BaseModel):
    """A span of a trace, to which other processes add theirs. At most 570 bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    traceparent: Annotated[str, Field(pattern=_PARENT)]
    tracestate: Annotated[str, Field(max_length=MAX_STATE_CHARS, exclude_if=lambda state: not state)] = ""

    @property
    def trace_id(self) -> str:
        return self.traceparent[3:35]

    @property
    def span_id(self) -> str:
        return self.traceparent[36:52]

    @property
    def flags(self) -> int:
        return int(self.traceparent[53:], 16)

    @property
    def sampled(self) -> bool:
        """Whether the spans of this trace are kept."""
        return bool(self.flags & 1)

    @property
    def headers(self) -> dict[str, str]:
        """The headers that hand it on."""
        state = {"tracestate": self.tracestate} if self.tracestate else {}
        return {"traceparent": self.traceparent, **state}


def accepted(traceparent: Sequence[str], tracestate: Sequence[str] = ()) -> TraceContext | None:
    """Return the context in the values of a request's headers; None without a valid `traceparent`.

    A `tracestate` that is invalid or too long is left out, as the specification has it.
    """
    if len(traceparent) != 1:
        return None
    header = traceparent[0].strip()
    found = _HEADER.fullmatch(header)
    if found is None or (header.startswith("00") and found.group(1) is not None):
        return None
    return TraceContext(traceparent=f"00{header[2:55]}", tracestate=_state(",".join(tracestate)))


def _state(header: str) -> str:
    """Return a valid `tracestate` without empty members, or nothing."""
    members = [member for part in header.split(",") if (member := part.strip())]
    keys = {member.partition("=")[0] for member in members}
    valid = all(_STATE_MEMBER.fullmatch(member) for member in members) and len(keys) == len(members)
    state = ",".join(members)
    return state if valid and len(members) <= MAX_STATE_MEMBERS and len(state) <= MAX_STATE_CHARS else ""
