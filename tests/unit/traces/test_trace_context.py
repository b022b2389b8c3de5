"""`traceparent` and `tracestate` of requests: what is accepted, and what is not."""

from __future__ import annotations

import pytest

from shared.runtime.tracing import TraceContext
from shared.runtime.tracing.otel import accepted

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"


def test_a_valid_header_names_its_trace_and_span() -> None:
    context = accepted([f" {PARENT} "])
    assert context is not None
    assert (context.trace_id, context.span_id, context.sampled) == (TRACE, SPAN, True)
    assert context.headers == {"traceparent": PARENT}


def test_an_unsampled_trace_stays_so() -> None:
    context = accepted([f"00-{TRACE}-{SPAN}-00"])
    assert context is not None
    assert not context.sampled


def test_a_later_version_is_read_as_the_known_one() -> None:
    """The specification: its first fields do not change."""
    assert accepted([f"cc-{TRACE}-{SPAN}-01-what-follows"]) == accepted([PARENT])


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-1",
        f"cc-{TRACE}-{SPAN}-01x",
        f"cc-{TRACE}-{SPAN}-01-\r\nset-cookie: a",
        f"00-{TRACE[:-1]}é-{SPAN}-01",
    ],
)
def test_an_invalid_header_is_ignored(header: str) -> None:
    assert accepted([header]) is None


def test_none_of_two_headers_is_taken() -> None:
    assert accepted([PARENT, PARENT]) is None


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([], ""),
        (["a=1,b@c=2"], "a=1,b@c=2"),
        (["a=1", " b=2 ,, "], "a=1,b=2"),
        (["a=1,a=2"], ""),
        (["A=1"], ""),
        (["a=é"], ""),
        (["a=1\r\nx: y"], ""),
        ([",".join(f"k{number}=1" for number in range(33))], ""),
        ([f"a={'x' * 256},b={'x' * 256}"], ""),
    ],
)
def test_an_invalid_state_is_left_out_and_the_trace_goes_on(headers: list[str], expected: str) -> None:
    context = accepted([PARENT], headers)
    assert context is not None
    assert context.tracestate == expected


def test_its_wire_form_is_bounded() -> None:
    """It is part of each job's record."""
    context = accepted([PARENT], [f"a={'x' * 255},b={'x' * 252}"])
    assert context is not None
    wire = context.model_dump_json()
    assert len(wire) < 620
    assert TraceContext.model_validate_json(wire) == context
