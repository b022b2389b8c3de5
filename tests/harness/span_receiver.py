"""OTLP/HTTP receiver that keeps the spans it is sent."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from harness.waiting import wait_until

Value = str | int | float | bool | list[str]


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as a trace store would keep it; `links` are trace and span ids."""

    service: str
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Value]
    links: tuple[tuple[str, str], ...]
    error: str | None


class SpanReceiver:
    """Parses each request of an exporter; `status` is its response."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.status = 200
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["content-length"]))
                if receiver.status == 200 and self.path == "/v1/traces":
                    receiver.spans.extend(_spans(ExportTraceServiceRequest.FromString(content)))
                self.send_response(receiver.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def of_trace(self, trace_id: str) -> list[ReceivedSpan]:
        return [span for span in list(self.spans) if span.trace_id == trace_id]

    def wait_for(self, *names: str, trace_id: str | None = None, timeout_s: float = 60.0) -> list[ReceivedSpan]:
        """Return the spans, of one trace or of all, once there is one of each name."""

        def found() -> list[ReceivedSpan]:
            return list(self.spans) if trace_id is None else self.of_trace(trace_id)

        wait_until(lambda: set(names) <= {span.name for span in found()}, f"spans {names} are received", timeout_s)
        return found()


@contextlib.contextmanager
def receiving_spans() -> Iterator[SpanReceiver]:
    """Run a receiver on a free port."""
    receiver = SpanReceiver()
    thread = threading.Thread(target=receiver.server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield receiver
    finally:
        receiver.server.shutdown()
        thread.join()
        receiver.server.server_close()


def _spans(request: ExportTraceServiceRequest) -> Iterator[ReceivedSpan]:
    for group in request.resource_spans:
        service = next(str(_value(item.value)) for item in group.resource.attributes if item.key == "service.name")
        for scope in group.scope_spans:
            for span in scope.spans:
                yield ReceivedSpan(
                    service=service,
                    name=span.name,
                    kind=Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    start_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                    attributes={item.key: _value(item.value) for item in span.attributes},
                    links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
                    error=span.status.message if span.status.code == Status.STATUS_CODE_ERROR else None,
                )


def _value(value: AnyValue) -> Value:
    readers: dict[str, Callable[[], Value]] = {
        "string_value": lambda: value.string_value,
        "int_value": lambda: value.int_value,
        "double_value": lambda: value.double_value,
        "bool_value": lambda: value.bool_value,
        "array_value": lambda: [item.string_value for item in value.array_value.values],
    }
    return readers[str(value.WhichOneof("value"))]()
