"""A receiver of spans, and traces that are sent to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness.span_receiver import SpanReceiver, receiving_spans

from shared.runtime import tracing


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[SpanReceiver]:
    """A receiver that the standard variable names."""
    with receiving_spans() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        yield receiver


@pytest.fixture
def traces(receiver: SpanReceiver) -> Iterator[SpanReceiver]:
    """The receiver, with traces on."""
    tracing.configure(True, "fusequeue-test")
    yield receiver
    tracing.close()
