"""Header parsers: what RFC 9110 and RFC 7240 say for valid values, and no other error for any text; intervals."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.errors import RangeNotSatisfiable
from api.protocols.huggingface.routes import output_format
from api.protocols.openai.batch_routes import interval_s
from api.protocols.replicate.prediction_routes import deadline_s
from api.responses import etag_matches
from api.routes.artifacts import requested_range
from api.waiting import preferred_wait_s
from shared.errors import InvalidRequest
from shared.tasks import OutputFormat

MAX_DEADLINE_S = 7 * 86_400
header_text = st.text(st.characters(codec="latin-1"), max_size=60)
numbers = st.integers(0, 10**18 - 1)
near = settings(max_examples=100, deadline=None, derandomize=True)


@near
@given(first=numbers, last=st.none() | numbers, size=st.integers(1, 10**15))
def test_a_range_from_an_offset_is_that_of_the_rfc(first: int, last: int | None, size: int) -> None:
    header = f"bytes={first}-{'' if last is None else last}"
    if last is not None and last < first:
        assert requested_range(header, size) is None
    elif first >= size:
        with pytest.raises(RangeNotSatisfiable):
            requested_range(header, size)
    else:
        assert requested_range(header, size) == (first, size if last is None else min(size, last + 1))


@near
@given(count=st.integers(1, 10**18 - 1), size=st.integers(1, 10**15))
def test_a_range_of_the_last_bytes_is_that_of_the_rfc(count: int, size: int) -> None:
    assert requested_range(f"bytes=-{count}", size) == (max(0, size - count), size)


@near
@given(header=header_text | header_text.map(lambda text: f"bytes={text}"), size=st.integers(0, 1000))
def test_any_range_header_is_within_the_object_ignored_or_refused(header: str, size: int) -> None:
    try:
        part = requested_range(header, size)
    except RangeNotSatisfiable:
        return
    assert part is None or 0 <= part[0] < part[1] <= size


@near
@given(
    seconds=st.integers(0, 10**9 - 1),
    before=st.sampled_from(("", "respond-async, ", "return=minimal,")),
    after=st.sampled_from(("", "; x=y", ", handling=lenient")),
    name=st.sampled_from(("wait", "Wait", "WAIT ")),
)
def test_a_preferred_wait_is_found_among_others_and_bounded(seconds: int, before: str, after: str, name: str) -> None:
    assert preferred_wait_s(f"{before}{name}={seconds}{after}", 60) == min(seconds, 60)


@near
@given(header=header_text | header_text.map(lambda text: f"wait{text}"))
def test_any_preference_is_a_bounded_wait_or_ignored(header: str) -> None:
    wait_s = preferred_wait_s(header, 60)
    assert wait_s is None or 0 <= wait_s <= 60


@near
@given(
    others=st.lists(st.text("abcdef0123456789", min_size=1, max_size=8).map(lambda tag: f'"{tag}"'), max_size=4),
    weak=st.booleans(),
    at=st.integers(0, 4),
)
def test_an_etag_is_found_in_any_place_weak_or_strong(others: list[str], weak: bool, at: int) -> None:
    others = [tag for tag in others if tag != '"wanted"']
    tags = [*others[:at], f'{"W/" if weak else ""}"wanted"', *others[at:]]
    assert etag_matches(", ".join(tags), '"wanted"')
    assert etag_matches(", ".join(others), '"wanted"') is False


@near
@given(hours=st.integers(0, 999), minutes=st.integers(0, 999), seconds=st.integers(0, 9999))
def test_a_deadline_is_the_sum_of_its_parts_or_refused(hours: int, minutes: int, seconds: int) -> None:
    total = 3600 * hours + 60 * minutes + seconds
    text = f"{hours}h{minutes}m{seconds}s"
    if 0 < total <= MAX_DEADLINE_S:
        assert deadline_s(text) == total
    else:
        with pytest.raises(InvalidRequest):
            deadline_s(text)


@near
@given(text=st.text(max_size=32) | st.from_regex(r"[0-9]{1,8}[hms]?", fullmatch=True))
def test_any_duration_is_positive_and_bounded_or_refused(text: str) -> None:
    with contextlib.suppress(InvalidRequest):
        assert 0 < deadline_s(text) <= MAX_DEADLINE_S


@near
@given(accept=header_text)
def test_any_accept_header_selects_an_image_format(accept: str) -> None:
    assert output_format(accept) in set(OutputFormat) - {OutputFormat.MP4, OutputFormat.LATENT}


@pytest.mark.parametrize(("streams", "seconds"), [(1, 1.0), (200, 1.0), (400, 2.0), (2_000, 10.0), (5_000, 15.0)])
def test_the_streams_of_a_tenants_batches_read_less_often_the_more_there_are(streams: int, seconds: float) -> None:
    assert interval_s(streams, keepalive_s=15.0) == seconds
