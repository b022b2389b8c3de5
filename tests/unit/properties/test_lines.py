"""Lines of bulk requests and of batch files: both readers find the same lines, however the bytes arrive."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

from hypothesis import given, settings
from hypothesis import strategies as st

from api import strict_json
from api.http.ndjson import Line, Splitter
from api.protocols.openai.batches.batch_lines import MAX_ERRORS, LineChecker, parse_line
from api.protocols.openai.stored_files import read_lines

MAX_BYTES = 12
near = settings(max_examples=100, deadline=None, derandomize=True)
pieces = st.lists(st.text("\n\r\t a{}\ufeff\0", max_size=20).map(str.encode), max_size=8)
line_values = st.fixed_dictionaries(
    {},
    optional={
        "custom_id": st.sampled_from(("a", "b", "", "\ud800", 7, None)) | st.text(max_size=5),
        "method": st.sampled_from(("POST", "GET", "post", None)),
        "url": st.sampled_from(("/v1/jobs", "/v1/videos", "", None)),
        "body": st.sampled_from(({}, [], None, {"model": "a"})),
    },
)


def expected(data: bytes) -> list[Line]:
    """Return the lines that are not blank."""
    rows = data.split(b"\n")
    lines = [(number, row, row.strip(b" \t\r")) for number, row in enumerate(rows, 1)]
    return [Line(n, None if len(row) > MAX_BYTES else raw) for n, row, raw in lines if raw or len(row) > MAX_BYTES]


@near
@given(some=pieces)
def test_a_bulk_request_has_the_same_lines_in_any_pieces(some: list[bytes]) -> None:
    splitter = Splitter(MAX_BYTES)
    found = [line for piece in some for line in splitter.feed(piece)]
    assert [*found, *splitter.finish()] == expected(b"".join(some))


@near
@given(some=pieces)
async def test_a_batch_file_has_the_same_lines_in_any_pieces(some: list[bytes]) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for piece in some:
            yield piece

    data = b"".join(some)
    found = [line async for line in read_lines(chunks(), 0, MAX_BYTES)]
    assert [Line(line.number, line.raw) for line in found if not line.blank] == expected(data)
    assert [data[: line.end].count(b"\n") for line in found if line.end < len(data)] == [
        line.number for line in found if line.end < len(data)
    ]


@near
@given(lines=st.lists(line_values | st.just([]), max_size=5), garbage=st.binary(max_size=30))
def test_a_line_that_passes_the_check_can_be_parsed(lines: list[object], garbage: bytes) -> None:
    checker = LineChecker("/v1/jobs")
    for number, raw in enumerate([*(json.dumps(line).encode() for line in lines), garbage], 1):
        before = len(checker.errors)
        checker.check(number, raw)
        if len(checker.errors) == before < MAX_ERRORS:
            line = parse_line(number, raw)
            assert strict_json.decode(raw)["custom_id"] == line.custom_id
    assert checker.total == len(lines) + 1
