"""The Lua scripts: headers that match their Python methods, key names, and the pure decisions."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import AsyncIterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from fakeredis import FakeAsyncRedis

from shared.config.settings import Settings
from shared.job_fields import Priority
from shared.queue.maintenance.grace import decide
from shared.queue.maintenance.recount import certain
from shared.queue.redis_keys import KEYS, RedisKey, RedisKeys, lua_keys
from shared.queue.script_arguments import ClaimKey, lua_arguments, parameter_names
from shared.queue.scripts import FOLDER, PARTS, Scripts, script_files, script_methods, script_text

LIB = (
    "prelude",
    "readiness",
    "tenants",
    "dated",
    "device_times",
    "latest_start",
)
TEXT = "\n".join(script_files()[name].read_text("utf-8") for name in LIB)
FILES = script_files().items()
SCRIPTS = [name for name, path in FILES if path.parent.name not in PARTS]
ALL_KEYS = lua_keys(" ".join(f"key.{name}" for name in KEYS))


@pytest.fixture
async def redis() -> AsyncIterator[FakeAsyncRedis]:
    client = FakeAsyncRedis(decode_responses=True, protocol=2)
    yield client
    await client.aclose()


async def evaluate(redis: FakeAsyncRedis, expression: str, *args: Any, conf: str = "") -> Any:
    return await redis.eval(f"local conf = {{{conf}}}\n{ALL_KEYS}\n{TEXT}\nreturn {expression}", 1, "{fq:test}:", *args)


@pytest.mark.parametrize("name", sorted(KEYS))
async def test_lua_and_python_build_the_same_key(redis: FakeAsyncRedis, name: str) -> None:
    """Each key that a script builds is the key that Python reads; in Lua a priority is its rank."""
    parts = KEYS[name].parts
    python: Any = getattr(RedisKeys("test"), name)
    if not parts:
        assert await evaluate(redis, f"key.{name}") == python
        return
    lua_args = ", ".join("2" if part == "priority" else f"'{part}'" for part in parts)
    python_args = [Priority.BULK.value if part == "priority" else part for part in parts]
    assert await evaluate(redis, f"key.{name}({lua_args})") == python(*python_args)


def test_a_key_with_the_wrong_number_of_parts_is_an_error() -> None:
    """A forgotten part would name another key."""
    with pytest.raises(TypeError, match="lane takes the parts sig, priority, tenant"):
        RedisKeys("test").lane("signature", "bulk")


async def test_ranks_are_the_priorities_in_order(redis: FakeAsyncRedis) -> None:
    """Rank 0 is served first."""
    assert await evaluate(redis, "{RANKS[0], RANKS[1], RANKS[2]}") == [priority.value for priority in Priority]


@pytest.mark.parametrize("key", KEYS.values(), ids=lambda key: key.name)
def test_every_key_has_a_ttl_or_a_bound(key: RedisKey) -> None:
    """The check after each test, for keys without a TTL, uses the same table."""
    if key.kind != "channel":
        assert key.ttl or key.bound or key.live
        keys, example = RedisKeys("test"), f"{{fq:test}}:{key.name}" + (":x" if key.parts else "")
        assert keys.bounded(example) == (not key.ttl)
        assert keys.bounded(example, unfinished_jobs=False) == (not key.ttl and not key.live)


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_script_has_a_method_with_its_parameters(name: str) -> None:
    """The `args` line lists the method's parameters in the same order, and the script reads each, and no other."""
    text, names = script_files()[name].read_text("utf-8"), parameter_names(getattr(Scripts, name))
    listed = re.search(r"^-- args +(\w.*(?:\n-- {10,}\w+\b(?!:).*)*)$", text.split("\n-- Returns", 1)[0], re.MULTILINE)
    assert (re.findall(r"[\w.]+", listed.group(1).replace("\n--", "")) if listed else []) == names
    assert set(re.findall(r"\bargs\.(\w+)", text)) == {one.removesuffix("...") for one in names}
    assert "ARGV" not in text


async def test_a_script_reads_its_arguments_by_name_in_their_types(redis: FakeAsyncRedis) -> None:
    """Of rows, each is a table; None is nil."""

    async def method(
        self: object, text: str, count: int | None, flag: bool, named: str | None, *rows: ClaimKey
    ) -> None:
        """Has an argument of each kind."""

    script = f"{lua_arguments(method)}\nreturn cjson.encode(args)"
    read = [await redis.eval(script, 0, "a", *values, "job_1", 7, "job_2", 8) for values in ((5, 1, "b"), ("", 0, ""))]
    rows = [{"job_id": "job_1", "epoch": 7}, {"job_id": "job_2", "epoch": 8}]
    assert json.loads(read[0]) == {"text": "a", "count": 5, "flag": True, "named": "b", "rows": rows}
    assert json.loads(read[1]) == {"text": "a", "flag": False, "rows": rows}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_sent_with_the_functions_that_it_calls(name: str) -> None:
    """With all of them, and no others: each run makes them again."""
    text = re.sub(r"--.*", "", script_text(name, Settings()))
    defined = set(re.findall(r"^function (\w+\.\w+)", text, re.MULTILINE))
    called = set(re.findall(r"(?<![\w.])(\w+\.\w+)\(", re.sub(r"^function \w+\.\w+", "", text, flags=re.MULTILINE)))
    assert {one for one in called if one.partition(".")[0] in NEEDS} <= defined
    parts = {one for one in defined if one.partition(".")[0] in NEEDS}
    assert {one for one in parts if text.count(one) == 1} == set()


@pytest.mark.parametrize("name", script_files())
def test_lines_of_scripts_are_short(name: str) -> None:
    """As ruff holds those of Python."""
    assert [line for line in script_files()[name].read_text("utf-8").split("\n") if len(line) > 128] == []


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_script_states_its_reply(name: str) -> None:
    """Each script begins with comments, which end with its reply."""
    head = "\n".join(takewhile(lambda line: line.startswith("--"), script_files()[name].read_text("utf-8").split("\n")))
    assert "\n-- Returns  " in head


NEEDS = {name: " ".join(re.findall(r"^-- NEEDS (.*)$", path.read_text("utf-8"), re.M)).split() for name, path in FILES}
CODE = {name: re.sub(r"'[^'\n]*'|\"[^\"\n]*\"|--[^\n]*", "''", path.read_text("utf-8")) for name, path in FILES}
OWNERS = {
    table: name
    for name, path in FILES
    if path.parent.name in PARTS
    for table in re.findall(r"^(?:function )?(\w+)\.\w+ *[(=]", CODE[name], re.MULTILINE)
}
"""The part that defines each table of functions."""


def included(name: str) -> set[str]:
    """Return the parts that are sent with a file: those that it needs, and those that these need."""
    return {*NEEDS[name]}.union(*map(included, NEEDS[name]))


@pytest.mark.parametrize("name", CODE)
def test_each_file_uses_the_parts_that_it_needs_and_no_others(name: str) -> None:
    """Redis compiles and sends a part that nothing uses: with `job_state`, 1,300 lines instead of 37."""
    used = {OWNERS[table] for table in re.findall(r"(?<![.\w])(\w+)[.\[]", CODE[name]) if table in OWNERS} - {name}
    assert used >= {*NEEDS[name]}, f"unused: {sorted({*NEEDS[name]} - used)}"
    assert used <= included(name), f"missing: {sorted(used - included(name))}"


def test_each_method_has_a_script() -> None:
    """No method is left over when a script goes."""
    methods = {name for name, _ in inspect.getmembers(Scripts, inspect.iscoroutinefunction) if name[0] != "_"}
    assert methods == set(SCRIPTS)


def test_script_names_are_unique() -> None:
    """Scripts are found only by name, whatever their folder."""
    assert len(script_files()) == len(list(FOLDER.glob("*/*.lua")))
    assert not list(FOLDER.glob("*.lua"))


# now = 1000, window = 50, efficient_rows = 8 unless the row says otherwise; the last column is when the jobs are ready.
READINESS = [
    ("a first arrival does not wait: no other is expected", {"oldest": 990, "slots": 1}, 990),
    ("another arrival is likely: the oldest waits its window", {"oldest": 990, "slots": 3, "gap": 10}, 1040),
    ("the window has passed while no worker was free", {"oldest": 900, "slots": 3, "gap": 10}, 950),
    ("the expected gap is longer than the window", {"oldest": 990, "slots": 1, "gap": 51}, 990),
    ("a gap as long as the window is still waited for", {"oldest": 990, "slots": 1, "gap": 50}, 1040),
    ("enough slots for an efficient batch are ready now", {"oldest": 995, "slots": 8, "gap": 1}, 1000),
    ("more slots than that are ready now", {"oldest": 995, "slots": 30, "gap": 1}, 1000),
    ("a full batch whose window has passed has been ready since", {"oldest": 900, "slots": 8, "gap": 1}, 950),
    (
        "the workers learned that fewer rows are efficient",
        {"oldest": 995, "slots": 4, "gap": 1, "efficient_rows": 4},
        1000,
    ),
    ("a released job has been ready since its release", {"oldest": 995, "slots": 2, "gap": 1, "returned": 980}, 980),
    ("released jobs need no lane", {"slots": 1, "gap": 1, "returned": 980}, 980),
    ("the clock was set back since the oldest arrived", {"oldest": 900000, "slots": 1, "gap": 10}, 1000),
    ("the clock was set back since a release", {"slots": 1, "gap": 1, "returned": 900000}, 1000),
    ("an arrival of the same script is no clock that was set back", {"oldest": 1001, "slots": 1, "gap": 10}, 1051),
    ("a deadline ends the window early", {"oldest": 990, "slots": 3, "gap": 10, "start_by": 1020}, 1020),
    ("a deadline after the window changes nothing", {"oldest": 990, "slots": 3, "gap": 10, "start_by": 2000}, 1040),
    ("without a window jobs are ready at their arrival", {"oldest": 990, "slots": 1, "window": 0, "gap": 0}, 990),
]


@pytest.mark.parametrize(("why", "queued", "ready_at"), READINESS, ids=[row[0] for row in READINESS])
async def test_readiness(redis: FakeAsyncRedis, why: str, queued: dict[str, int], ready_at: int) -> None:
    """When the queued jobs of one signature may start a batch."""
    facts = {"now": 1000, "window": 50, "efficient_rows": 8, **queued}
    table = ", ".join(f"{name} = {value}" for name, value in facts.items())
    assert await evaluate(redis, f"readiness.ready_at({{{table}}})") == ready_at, why


GAPS = [
    ("nothing is known after a first arrival", "nil", "nil", 50, None),
    ("two arrivals give a first estimate", "nil", "20", 50, 20),
    ("later ones move it", "20", "40", 50, 26),
    ("a gap of ten windows is still a gap", "20", "500", 50, 164),
    ("a longer silence makes the estimate stale", "20", "501", 50, None),
    ("the clock was set back since the last arrival", "20", "-5000", 50, None),
    ("without a window no arrival is expected", "nil", "1", 0, None),
]


@pytest.mark.parametrize(("why", "gap", "since", "window", "expected"), GAPS, ids=[row[0] for row in GAPS])
async def test_expected_gap(
    redis: FakeAsyncRedis, why: str, gap: str, since: str, window: int, expected: int | None
) -> None:
    """How past arrivals predict the next one."""
    assert await evaluate(redis, f"readiness.next_gap({gap}, {since}, {window})") == expected, why


# now = 100000, lease = 8000, so that a grace is 8000 long; the last columns are before when a lease must have ended to
# be reclaimed, and when the last gap ended.
GRACES = [
    ("the first call of a namespace", {}, 100000, None),
    ("calls as often as workers make them", {"last": 99000}, 100000, None),
    ("a gap of half a lease cannot end a lease", {"last": 96000}, 100000, None),
    ("a longer gap: its holders renew first", {"last": 95999}, 0, 100000),
    ("within the grace", {"last": 99000, "gap": 92001}, 0, 92001),
    ("after the grace", {"last": 99000, "gap": 92000}, 100000, 92000),
    ("a second gap after the grace of the first", {"last": 90000, "gap": 80000}, 0, 100000),
    ("a second gap within the grace of the first", {"last": 94000, "gap": 93000}, 0, 100000),
    ("a second gap soon after the first, longer than its grace", {"last": 90001, "gap": 90000}, 0, 100000),
    ("the second call of chores without a worker between them", {"last": 90000, "gap": 90000, "gaps": 1}, 0, 100000),
    ("the third: no worker is there to renew", {"last": 90000, "gap": 90000, "gaps": 2}, 100000, 100000),
    ("an outage after two calls of chores", {"last": 84999, "gap": 84999, "gaps": 2}, 0, 100000),
    ("the clock was set back since the last call", {"last": 900000}, 100000, None),
    ("the clock was set back since the last gap", {"last": 99000, "gap": 900000}, 100000, None),
]


@pytest.mark.parametrize(("why", "facts", "before", "gap"), GRACES, ids=[row[0] for row in GRACES])
def test_holders_renew_before_their_leases_are_reclaimed_after_a_gap(
    why: str, facts: dict[str, int], before: int, gap: int | None
) -> None:
    """Which leases a reclaim takes, from when the last one was."""
    found = decide(now=100000, lease=8000, **facts)
    assert (found.before_ms, found.gap_ms) == (before, gap), why


LATEST_STARTS = [
    ("the deadline, before anything is learned", "nil, 8, nil", 50_000),
    ("the deadline minus the time of its steps and the rest", "500, 8, 1000", 45_000),
    ("no time before the epoch", "9999, 8, 0", 0),
]


@pytest.mark.parametrize(("why", "known", "start_by"), LATEST_STARTS, ids=[row[0] for row in LATEST_STARTS])
async def test_latest_start(redis: FakeAsyncRedis, why: str, known: str, start_by: int) -> None:
    """By when a job with a deadline must start."""
    assert await evaluate(redis, f"latest_start.of(50000, {known})") == start_by, why


MINUTE, DAY = 60_000, 86_400_000
SLOW, FAST = (400, 100, 8), (40, 10, 8)  # ms of a step and of the rest, steps
DEVICE_TIMES = [
    ("nothing is known", [], 0, 0, [0]),
    ("too few jobs for a bound", [(0, 3, SLOW)], 0, 0, [3300, 400, 100]),
    ("half of the least time of a step and of the rest", [(0, 4, SLOW)], 0, 1050, [3300, 400, 100]),
    ("jobs of one step teach both", [(0, 10, (16, 14, 1))], 0, 47, [30, 16, 14]),
    ("a faster device counts at once", [(0, 50, SLOW), (0, 1, FAST)], 0, 105, [3003, 364, 91]),
    ("slow jobs do not raise the bound", [(0, 4, FAST), (MINUTE, 100, SLOW)], MINUTE, 105, [3300, 400, 100]),
    ("nor a day later", [(0, 4, FAST), (DAY + 1, 4, SLOW)], DAY + 1, 105, [3300, 400, 100]),
    ("after two days they do", [(0, 4, FAST), (DAY + 1, 4, SLOW), (2 * DAY + 2, 4, SLOW)], 2 * DAY + 2, 1050, None),
    ("nothing counts when no job has ended lately", [(0, 9, SLOW)], 10 * MINUTE + 1, 0, [0]),
    ("nor after the clock was set back", [(9 * DAY, 9, SLOW)], 0, 0, [0]),
    ("long jobs count longer", [(0, 9, (10 * MINUTE, 0, 8))], 20 * MINUTE, 25 * MINUTE, None),
    ("afterwards some more jobs are needed", [(0, 9, SLOW), (11 * MINUTE, 3, FAST)], 11 * MINUTE, 0, [330, 40, 10]),
    ("the least time outlasts a clock set back", [(9 * DAY, 9, FAST), (0, 4, SLOW)], 0, 105, [3300, 400, 100]),
]


@pytest.mark.parametrize(("why", "jobs", "now", "bound", "means"), DEVICE_TIMES, ids=[row[0] for row in DEVICE_TIMES])
async def test_device_times(
    redis: FakeAsyncRedis, why: str, jobs: list[Any], now: int, bound: int, means: list[int] | None
) -> None:
    """The bound of a job of five steps, and the mean times, after jobs that ended at a time.

    Each row of `jobs` is the time, the number of equal jobs, and what each took.
    """
    lines = [
        f"for _ = 1, {count} do known = device_times.after(known, {{step = {step}, rest = {rest}, "
        f"run = {step * steps + rest}, least_step = {step}, least_rest = {rest}}}, {at}) end"
        for at, count, (step, rest, steps) in jobs
    ]
    learn = f"(function() local known = {{}} {' '.join(lines)} return known end)()"
    assert await evaluate(redis, f"math.floor(device_times.bound({learn}, 5, {now}) + 0.5)") == bound, why
    found = json.loads(await evaluate(redis, f"cjson.encode({{device_times.means({learn}, {now})}})"))
    assert means is None or [round(value) for value in found] == means, why


# Seconds that a tenant has used, and those after a change of them at the same time or half-lives later.
USAGE = [
    ("a first charge", None, 3, 0, 3),
    ("charges add up", 4, 3, 0, 7),
    ("usage halves every five minutes", 4, 3, 1, 5),
    ("a charge is removed", 4, -3, 0, 1),
    ("nothing is left", 4, -4, 0, None),
    ("nothing was known", None, -4, 0, None),
    ("a job that cost nothing", 4, 0, 0, 4),
]


@pytest.mark.parametrize(("why", "used", "seconds", "half_lives", "left"), USAGE, ids=[row[0] for row in USAGE])
async def test_usage_of_a_tenant(
    redis: FakeAsyncRedis, why: str, used: int | None, seconds: int, half_lives: int, left: int | None
) -> None:
    """GPU-seconds decay, as they are stored: log2 on a moving time scale."""
    at = 300_000 * half_lives
    known = "nil" if used is None else f"tenants.usage_after(nil, {used}, 0)"
    found = await evaluate(redis, f"tostring(tenants.usage_after({known}, {seconds}, {at}))")
    assert (None if found == "nil" else round(2 ** (float(found) - half_lives), 6)) == left, why


@pytest.mark.parametrize("path", script_files().values(), ids=lambda path: path.stem)
def test_no_script_uses_commands_that_lose_jobs(path: Path) -> None:
    """XCLAIM FORCE revives acked entries, DELCONSUMER strands pending ones, lag can be nil, BLOCK is an error."""
    code = "\n".join(line.split("--")[0] for line in path.read_text("utf-8").splitlines())
    for word in ("XCLAIM", "XAUTOCLAIM", "DELCONSUMER", "BLOCK", "'lag'", "'$'", "'KEYS'", "'SCAN'"):
        assert word not in code, f"{path.name} uses {word}"
    for text in code.splitlines():
        if "MAXLEN" in text:
            # The outbox is trimmed at 100,000 events of a tenant that no chores worker has fetched for days.
            assert any(name in text for name in ("key.events", "key.wakeup", "key.webhook_outbox")), (
                f"{path.name} trims a stream that can hold jobs: {text}"
            )


class OneRunner:
    """Returns 1 for every script, and keeps the values that it was sent."""

    def __init__(self) -> None:
        self.values: tuple[Any, ...] = ()

    async def run(self, name: str, *values: Any) -> Any:
        self.values = values
        return 1


async def test_a_script_that_returns_whether_something_changed_gives_a_bool() -> None:
    assert await script_methods(OneRunner()).heartbeat("w1", "{}", 1000, "", "") is True


async def test_named_arguments_are_sent_in_the_order_of_the_script() -> None:
    runner = OneRunner()
    await script_methods(runner).admit(requests_per_minute=60, tenant="acme")
    assert runner.values == ("acme", 60)


RECOUNTS = [
    ("a right counter", 5, 5, 0, 0),
    ("a counter that is too low", 3, 5, 0, 2),
    ("a counter that is too high", 5, 3, 0, -2),
    ("changes meanwhile explain the difference", 3, 5, 2, 0),
    ("more changes than the difference", 5, 3, 9, 0),
    ("changes explain a part of a missing count", 0, 1000, 30, 970),
    ("changes explain a part of a surplus", 1000, 0, 30, -970),
]


@pytest.mark.parametrize(
    ("case", "counter", "counted", "changes", "expected"), RECOUNTS, ids=[one[0] for one in RECOUNTS]
)
def test_only_the_certain_part_of_a_difference_is_repaired(
    case: str, counter: int, counted: int, changes: int, expected: int
) -> None:
    """Each change meanwhile can be counted or not."""
    assert certain(counter, counted, changes) == expected
