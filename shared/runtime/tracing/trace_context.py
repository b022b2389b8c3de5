"""W3C Trace Context: where a trace stands, as the headers `traceparent` and `tracestate` carry it."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MAX_STATE_CHARS = 512

_PARENT = r"^00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$"


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
