"""How often a tenant may ask: the pure part of the script that counts, run through EVAL."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fakeredis import FakeAsyncRedis

import shared.queue

RATE = (Path(shared.queue.__file__).parent / "lua" / "tenants" / "rate_limit.lua").read_text("utf-8")
NOW = 1_763_000_000_000


@pytest.fixture
async def redis() -> AsyncIterator[FakeAsyncRedis]:
    client = FakeAsyncRedis(decode_responses=True, protocol=2)
    yield client
    await client.aclose()


# why, limit, (requests, at ms after NOW)..., then of the last one: allowed, remaining, reset ms, retry ms
TABLE = [
    ("a first request leaves all but one", 60, [(1, 0)], (1, 59, 1000, 0)),
    ("all of a minute's requests may come at once", 60, [(60, 0)], (1, 0, 60_000, 0)),
    ("one more may not", 60, [(61, 0)], (0, 0, 60_000, 1000)),
    ("a refused one costs nothing: the wait stays the same", 60, [(161, 0)], (0, 0, 60_000, 1000)),
    ("half of the wait later half of it is left", 60, [(60, 0), (1, 500)], (0, 0, 59_500, 500)),
    ("after the wait there is one", 60, [(60, 0), (1, 1000)], (1, 0, 60_000, 0)),
    ("the limit grows back evenly", 60, [(60, 0), (1, 30_000)], (1, 29, 31_000, 0)),
    ("a quiet minute gives all of it back, and no more", 60, [(60, 0), (61, 300_000)], (0, 0, 60_000, 1000)),
    ("the clock was set back by an hour", 60, [(61, 3_600_000), (1, 0)], (1, 59, 1000, 0)),
    ("one a minute", 1, [(2, 0)], (0, 0, 60_000, 60_000)),
    ("a limit that does not divide a minute", 7, [(7, 0)], (1, 0, 60_000, 0)),
    ("nor does it let one more through", 7, [(8, 0)], (0, 0, 60_000, 8572)),
]


@pytest.mark.parametrize(("why", "limit", "requests", "expected"), TABLE, ids=[row[0] for row in TABLE])
async def test_rate(
    redis: FakeAsyncRedis, why: str, limit: int, requests: list[tuple[int, int]], expected: tuple[int, int, int, int]
) -> None:
    """The state between two requests is kept as the script keeps it: as text with three decimals."""
    script = f"""{RATE}
    local spent, last = nil, nil
    for at = 2, #ARGV, 2 do
      for _ = 1, tonumber(ARGV[at]) do
        last = rate_limit.admit(spent, {NOW} + tonumber(ARGV[at + 1]), tonumber(ARGV[1]))
        if last.spent then spent = tonumber(string.format('%.3f', last.spent)) end
      end
    end
    return {{last.spent and 1 or 0, last.remaining, last.reset, last.retry}}"""
    args = [part for pair in requests for part in pair]
    assert tuple(await redis.eval(script, 0, limit, *args)) == expected, why
