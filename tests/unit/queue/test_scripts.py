"""The scripts' common part, run through EVAL: key names that agree with Python's, and the decisions that are pure."""

from __future__ import annotations

import inspect
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fakeredis import FakeAsyncRedis

import shared.queue
import shared.queue.redis_keys
from shared.config.settings import Settings
from shared.job import Priority
from shared.queue.client import script_text
from shared.queue.redis_keys import RedisKeys

LUA = Path(shared.queue.__file__).parent / "lua"
PRELUDE = (LUA / "prelude.lua").read_text("utf-8")
SWAPS = (LUA / "swaps.lua").read_text("utf-8")
RANKED = {"lane": 1, "lanes": 1, "ripe": 1}
WHOLE_SCRIPTS = sorted(path.stem for path in LUA.glob("*.lua") if "\n-- KEYS[1]  prefix\n" in f"\n{path.read_text()}")
PARTS = {"prelude", "line", "ending", "filling", "hooks", "quota", "rate", "swaps"}


@pytest.fixture
async def redis() -> AsyncIterator[FakeAsyncRedis]:
    client = FakeAsyncRedis(decode_responses=True, protocol=2)
    yield client
    await client.aclose()


async def evaluate(redis: FakeAsyncRedis, expression: str, *args: Any) -> Any:
    return await redis.eval(f"local conf = {{}}\n{PRELUDE}\n{SWAPS}\nreturn {expression}", 1, "{fq:test}:", *args)


def _methods() -> list[str]:
    return [
        name
        for name, method in inspect.getmembers(RedisKeys, inspect.isfunction)
        if not name.startswith("_") and name != "bounded"
    ]


@pytest.mark.parametrize("name", _methods())
async def test_lua_and_python_build_the_same_names(redis: FakeAsyncRedis, name: str) -> None:
    """Each key that a script builds is the key that Python reads."""
    keys = RedisKeys("test")
    count = len(inspect.signature(getattr(keys, name)).parameters)
    python_args: list[Any] = [f"part{at}" for at in range(count)]
    lua_args = [f"'part{at}'" for at in range(count)]
    if name in RANKED:
        python_args[RANKED[name]], lua_args[RANKED[name]] = Priority.BULK.value, "2"
    made = await evaluate(redis, f"key.{name}({', '.join(lua_args)})")
    assert made == getattr(keys, name)(*python_args)


async def test_plain_names_agree_too(redis: FakeAsyncRedis) -> None:
    """The table of plain names in Lua holds no name that Python spells otherwise."""
    expression = "(function() local o = {} for n, k in pairs(key) do if type(k) == 'string' then table.insert(o, n) "
    names = await evaluate(redis, expression + "table.insert(o, k) end end return o end)()")
    keys = RedisKeys("test")
    assert len(names) > 20
    assert {name: getattr(keys, name) for name in names[::2]} == dict(zip(names[::2], names[1::2], strict=True))


async def test_ranks_are_the_priorities_in_order(redis: FakeAsyncRedis) -> None:
    """Rank 0 is served first."""
    assert await evaluate(redis, "{RANKS[0], RANKS[1], RANKS[2]}") == [priority.value for priority in Priority]


TABLE = [
    [cell.strip() for cell in row.strip("| ").split(" | ")]
    for row in (shared.queue.redis_keys.__doc__ or "").splitlines()
    if row.startswith("| ") and not row.startswith("| key ")
]


@pytest.mark.parametrize("row", TABLE, ids=[row[0] for row in TABLE])
def test_the_table_of_keys_is_true(row: list[str]) -> None:
    """A key without a TTL has a bound that is told, and the check after each test knows it by the same rule."""
    keys = RedisKeys("test")
    name, kind, ttl, bound = row[:4]
    example = keys.prefix + re.sub(r"<\w+>", "x", name)
    assert bound or ttl != "-", "neither a TTL nor a bound"
    if kind != "channel":
        assert keys.bounded(example) == (ttl == "-")


def test_the_table_of_keys_is_whole() -> None:
    """Every name that Keys can build stands in it."""
    told = {re.split(r"[:<]", row[0])[0] for row in TABLE}
    plain = {name for name in vars(RedisKeys("test")) if name != "prefix"}
    assert told == plain | {"dead" if name == "dead_letter" else name for name in _methods()}


# now = 1000, window = 50, paying = 8 unless the row says otherwise; the last column is when the line is ripe.
RIPENESS = [
    ("a first arrival waits for nothing: nobody is known to follow", {"oldest": 990, "seats": 1}, 990),
    ("company is likely: the oldest waits its window, from its arrival", {"oldest": 990, "seats": 3, "gap": 10}, 1040),
    ("the window has passed while no worker was free", {"oldest": 900, "seats": 3, "gap": 10}, 950),
    ("the expected gap is longer than the window: no company is likely", {"oldest": 990, "seats": 1, "gap": 51}, 990),
    ("a gap just as long as the window may still bring some", {"oldest": 990, "seats": 1, "gap": 50}, 1040),
    ("as many seats as pay are ripe now", {"oldest": 995, "seats": 8, "gap": 1}, 1000),
    ("more seats than pay are ripe now", {"oldest": 995, "seats": 30, "gap": 1}, 1000),
    ("a full line whose window has passed has been ripe since then", {"oldest": 900, "seats": 8, "gap": 1}, 950),
    ("the workers learned that fewer pay", {"oldest": 995, "seats": 4, "gap": 1, "paying": 4}, 1000),
    ("a job given back has been ripe since then", {"oldest": 995, "seats": 2, "gap": 1, "returned": 980}, 980),
    ("jobs given back alone need no lane", {"seats": 1, "gap": 1, "returned": 980}, 980),
    ("no window: all is ripe at its arrival", {"oldest": 990, "seats": 1, "window": 0, "gap": 0}, 990),
]


@pytest.mark.parametrize(("why", "line", "ripe_at"), RIPENESS, ids=[row[0] for row in RIPENESS])
async def test_ripeness(redis: FakeAsyncRedis, why: str, line: dict[str, int], ripe_at: int) -> None:
    """When the waiting jobs of one signature may start a batch."""
    facts = {"now": 1000, "window": 50, "paying": 8, **line}
    table = ", ".join(f"{name} = {value}" for name, value in facts.items())
    assert await evaluate(redis, f"rhythm.ripe_at({{{table}}})") == ripe_at, why


GAPS = [
    ("nothing is known of a first arrival", "nil", "nil", 50, None),
    ("two arrivals give a first guess", "nil", "20", 50, 20),
    ("later ones move it", "20", "40", 50, 26),
    ("a gap of ten windows is still a gap", "20", "500", 50, 164),
    ("beyond, it is a silence, and what was known is stale", "20", "501", 50, None),
    ("where nothing waits for company, none is expected", "nil", "1", 0, None),
]


@pytest.mark.parametrize(("why", "gap", "since", "window", "expected"), GAPS, ids=[row[0] for row in GAPS])
async def test_expected_gap(
    redis: FakeAsyncRedis, why: str, gap: str, since: str, window: int, expected: int | None
) -> None:
    """How arrivals foretell the next one."""
    made = await evaluate(redis, f"rhythm.next_gap({gap}, {since}, {window})")
    assert made == expected, why


# ripe = 1000, a load takes 200 and nobody else holds the model unless the row says otherwise; the last columns are when
# the signature takes its turn among others, and from when on an idle worker may take it.
TURNS = [
    ("in memory: it has its turn as it ripened", {"load": 0}, 1000, 1000),
    ("to be loaded: it counts as younger by three loads; an idle worker takes it at once", {}, 1600, 1000),
    ("another worker has it: left to that one for as long as a load takes", {"holders": 1}, 2200, 1200),
    ("a load's worth of work waits there: still left to it", {"holders": 1, "work": 200}, 2200, 1200),
    ("more work waits there than a load takes: a second one pays", {"holders": 1, "work": 201}, 2200, 1000),
    ("two have it: that is no more than a load's worth for each", {"holders": 2, "work": 400}, 2200, 1200),
    ("in memory here as well as elsewhere", {"load": 0, "holders": 3}, 1000, 1000),
]


@pytest.mark.parametrize(("why", "line", "turn", "free"), TURNS, ids=[row[0] for row in TURNS])
async def test_models_in_memory_go_first(
    redis: FakeAsyncRedis, why: str, line: dict[str, int], turn: int, free: int
) -> None:
    """Which signature a worker serves next, and when a model is worth loading."""
    facts = {"ripe": 1000, "load": 200, "holders": 0, "work": 0, **line}
    table = ", ".join(f"{name} = {value}" for name, value in facts.items())
    assert await evaluate(redis, f"{{swaps.turn_at({{{table}}}), swaps.free_at({{{table}}})}}") == [turn, free], why


@pytest.mark.parametrize("name", WHOLE_SCRIPTS)
def test_a_script_says_what_it_takes_and_returns(name: str) -> None:
    """Each script is headed by its keys, arguments and answer."""
    head = script_text(name, Settings()).rsplit("-- KEYS[1]  prefix\n", 1)[1]
    assert "-- Returns" in head.split("\nlocal ", 1)[0]


def test_no_script_is_without_a_head() -> None:
    """What is neither a part nor headed as a script has been forgotten."""
    assert {path.stem for path in LUA.glob("*.lua")} - PARTS == set(WHOLE_SCRIPTS)


@pytest.mark.parametrize("path", sorted(LUA.glob("*.lua")), ids=lambda path: path.stem)
def test_no_script_uses_what_loses_jobs(path: Path) -> None:
    """XCLAIM FORCE revives acked entries, DELCONSUMER strands pending ones, lag may be nil, BLOCK is an error."""
    code = "\n".join(line.split("--")[0] for line in path.read_text("utf-8").splitlines())
    for word in ("XCLAIM", "XAUTOCLAIM", "DELCONSUMER", "BLOCK", "'lag'", "'$'", "'KEYS'", "SCAN"):
        assert word not in code, f"{path.name} uses {word}"
    for text in code.splitlines():
        if "MAXLEN" in text:
            # The outbox is trimmed at a million events that no chores worker has fetched for days.
            assert any(name in text for name in ("key.events", "key.wakeup", "key.outbox")), (
                f"{path.name} trims a stream that may hold work: {text}"
            )
