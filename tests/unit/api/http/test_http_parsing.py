"""Ranges, strict JSON, NDJSON, the Prefer header and log lines, without an API."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from api import strict_json
from api.errors import RangeNotSatisfiable
from api.http.ndjson import Line, Splitter, Spool
from api.routes.artifacts import requested_range
from api.waiting import preferred_wait_s
from shared.errors import InvalidJson, InvalidRequest
from shared.runtime import log


@pytest.mark.parametrize(
    ("header", "part"),
    [
        (None, None),
        ("bytes=0-0", (0, 1)),
        ("bytes=2-5", (2, 6)),
        ("bytes=2-", (2, 10)),
        ("bytes=-3", (7, 10)),
        ("bytes=-30", (0, 10)),
        ("bytes=5-99", (5, 10)),
        ("bytes=0-1,4-5", None),
        ("bytes=5-2", None),
        ("lines=1-2", None),
        ("bytes=-", None),
        ("bytes=a-b", None),
    ],
)
def test_a_range_is_cut_to_the_object_and_an_invalid_one_means_all(
    header: str | None, part: tuple[int, int] | None
) -> None:
    assert requested_range(header, 10) == part


@pytest.mark.parametrize("header", ["bytes=10-", "bytes=99-100", "bytes=-0"])
def test_a_range_outside_the_object_is_refused(header: str) -> None:
    with pytest.raises(RangeNotSatisfiable):
        requested_range(header, 10)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"{", "invalid JSON"),
        (b"", "invalid JSON"),
        (b'{"a": NaN}', "invalid JSON: NaN"),
        (b'{"a": -Infinity}', "invalid JSON: -Infinity"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b'{"a": "\xff"}', "invalid UTF-8"),
        (b"{}\xef\xbb\xbf", "invalid JSON"),
        (b"\xef\xbb\xbf\xef\xbb\xbf{}", "invalid JSON"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "too many digits"),
        (b'{"a": 1} {}', "invalid JSON"),
        (b'{"a": "\x00"}', "invalid JSON"),
    ],
)
def test_invalid_json_is_refused(raw: bytes, words: str) -> None:
    with pytest.raises(InvalidJson, match=words):
        strict_json.decode(raw)


def test_a_byte_order_mark_before_json_is_left_out() -> None:
    assert strict_json.decode(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}


def test_a_repeated_key_is_named() -> None:
    with pytest.raises(InvalidRequest) as caught:
        strict_json.decode(b'{"seed": 1, "seed": 2}')
    assert caught.value.param == "seed"


def test_nul_characters_are_refused_at_any_depth() -> None:
    with pytest.raises(InvalidRequest) as caught:
        strict_json.decode(rb'{"metadata": {"order": ["x", "a\u0000b"]}}')
    assert caught.value.param == "metadata.order"
    with pytest.raises(InvalidRequest):
        strict_json.decode(rb'{"metadata": {"\u0000": 1}}')
    assert strict_json.decode(rb'{"prompt": "a\\u0000"}') == {"prompt": "a\\u0000"}


def test_half_of_a_surrogate_pair_is_refused_at_any_depth() -> None:
    with pytest.raises(InvalidRequest) as caught:
        strict_json.decode(rb'{"metadata": {"order": ["x", "a\udc00b"]}}')
    assert caught.value.param == "metadata.order"
    with pytest.raises(InvalidRequest):
        strict_json.decode(rb'{"metadata": {"\ud83d": 1}}')
    assert strict_json.decode(rb'{"prompt": "\ud83d\ude00"}') == {"prompt": "\U0001f600"}


def test_lines_do_not_depend_on_the_chunks() -> None:
    data = b'{"a":1}\r\n\n   \n{"b":2}\n' + b"x" * 50 + b'\n{"c":3}'
    whole = [Line(1, b'{"a":1}'), Line(4, b'{"b":2}'), Line(5, None), Line(6, b'{"c":3}')]
    for size in range(1, len(data) + 1):
        splitter, lines = Splitter(20), []
        for start in range(0, len(data), size):
            lines += splitter.feed(data[start : start + size])
        assert lines + list(splitter.finish()) == whole


def test_a_final_newline_adds_no_line() -> None:
    splitter = Splitter(20)
    assert [line.number for line in splitter.feed(b"1\n2\n")] == [1, 2]
    assert list(splitter.finish()) == []
    assert splitter.number == 2


def test_an_endless_line_is_not_buffered() -> None:
    splitter = Splitter(100)
    for _ in range(1000):
        assert list(splitter.feed(b"x" * 1000)) == []
    assert len(splitter._held) == 0
    assert list(splitter.feed(b"\n{}\n")) == [Line(1, None), Line(2, b"{}")]


async def test_a_spool_keeps_the_order_through_memory_and_disk() -> None:
    spool = Spool(memory_bytes=100, disk_bytes=10_000)
    written = [bytes([number % 256]) * 37 for number in range(200)]

    async def write() -> None:
        for piece in written:
            await spool.write(piece)
        await spool.end()

    writing, read = asyncio.ensure_future(write()), b""
    while piece := await spool.read():
        read += piece
        await asyncio.sleep(0.0005 if len(read) % 3 else 0)
    await writing
    spool.close()
    assert read == b"".join(written)


async def test_a_full_spool_blocks_its_writer() -> None:
    spool = Spool(memory_bytes=10, disk_bytes=50)
    await spool.write(b"x" * 60)
    writing = asyncio.ensure_future(spool.write(b"y"))
    done, _ = await asyncio.wait({writing}, timeout=0.05)
    assert not done
    assert await spool.read() == b"x" * 60
    await asyncio.wait_for(writing, 60)
    assert await spool.read() == b"y"
    spool.close()


@pytest.mark.parametrize(
    ("prefer", "wait_s"),
    [
        (None, None),
        ("respond-async", None),
        ("wait=5", 5.0),
        ("respond-async, wait=5", 5.0),
        ("wait = 5; x=y, return=minimal", 5.0),
        ("Wait=500", 60.0),
        ("wait", 60.0),
        ("wait=-1", None),
        ("wait=soon", None),
    ],
)
def test_prefer_is_parsed_like_the_rfc(prefer: str | None, wait_s: float | None) -> None:
    assert preferred_wait_s(prefer, 60) == wait_s


@pytest.fixture
def own_logging() -> Iterator[None]:
    """Restore the logging for other tests."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.mark.usefixtures("own_logging")
def test_log_lines_are_json_without_a_terminal() -> None:
    stream = io.StringIO()
    log.configure("INFO", stream=stream)
    structlog.get_logger("some.part").info("something_happened", jobs=3)
    structlog.get_logger("some.part").debug("not_shown")
    logging.getLogger("uvicorn.error").warning("from %s", "elsewhere")
    ours, theirs = map(json.loads, stream.getvalue().splitlines())
    assert (ours["event"], ours["jobs"], ours["level"]) == ("something_happened", 3, "info")
    assert (theirs["event"], theirs["logger"]) == ("from elsewhere", "uvicorn.error")
