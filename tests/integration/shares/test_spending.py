"""Device time of tenants in a day and a month: counted once, shown, and bounded."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from harness.queue import claim, lose, put

from shared.auth import Spent, TenantLimits
from shared.errors import QuotaExceeded
from shared.job import State
from shared.job_record import Outcome
from shared.queue import Queue, Submission
from shared.queue.api_keys import present_periods
from shared.queue.redis_keys import lua_keys
from shared.queue.scripts import FOLDER

Make = Callable[..., Submission]
DAYS = ("1970-01-01", "2000-02-29", "2023-12-31", "2024-02-29", "2024-03-01", "2026-11-30", "2027-01-01", "2100-03-01")


async def spend(queue: Queue, submission: Submission, seconds: float) -> None:
    await put(queue, submission)
    (one,) = await claim(queue, 1)
    outcome = Outcome(state=State.SUCCEEDED, device_seconds=seconds)
    for _ in range(2):  # a repetition, as after a lost reply
        assert await queue.claims.settle("w1", one.job.id, one.epoch, outcome, token="same")


async def refusal(queue: Queue, submission: Submission) -> QuotaExceeded:
    (result,) = await queue.jobs.submit([submission])
    assert isinstance(result, QuotaExceeded), result
    return result


@pytest.mark.parametrize("name", ["device_seconds_per_day", "device_seconds_per_month"])
async def test_a_tenant_that_has_spent_its_limit_waits(queue: Queue, make_submission: Make, name: str) -> None:
    """Its running job ends; other tenants are accepted, and so is it with a larger limit."""
    await queue.api_keys.set_limits("a", TenantLimits(**{name: 3}))
    await spend(queue, make_submission(tenant="a"), 2.5)
    await spend(queue, make_submission(tenant="a"), 1.0)
    assert (await queue.api_keys.spent()) == {"a": Spent(3.5, 3.5)}
    refused = await refusal(queue, make_submission(tenant="a"))
    assert refused.quota == name
    resets = datetime.fromisoformat(refused.message.rpartition("it resets at ")[2])
    assert (resets.hour, resets.day if name.endswith("month") else 1) == (0, 1)
    assert (resets - datetime.now(UTC)).total_seconds() == pytest.approx(refused.retry_after_s, abs=5)
    await put(queue, make_submission(tenant="b"))
    await queue.api_keys.set_limits("a", TenantLimits(**{name: 4}))
    await put(queue, make_submission(tenant="a"))


async def test_the_setting_limits_tenants_without_a_limit(
    queue_with: Callable[..., Queue], make_submission: Make
) -> None:
    queue = queue_with(max_device_seconds_per_day_per_tenant=1)
    await spend(queue, make_submission(tenant="a"), 1.0)
    assert (await refusal(queue, make_submission(tenant="a"))).quota == "device_seconds_per_day"


async def test_a_lost_run_counts_what_its_worker_reports_once(queue: Queue, make_submission: Make) -> None:
    """A killed worker reports nothing; one that has lost its claim does."""
    await put(queue, make_submission(tenant="a"))
    (first,) = await claim(queue, 1)
    await lose(queue, first.job.id)
    await queue.maintenance.reclaim()
    assert await queue.api_keys.spent() == {}
    outcome = Outcome(state=State.SUCCEEDED, device_seconds=0.5)
    assert await queue.claims.count_run(first.job, "lost", outcome)
    (again,) = await claim(queue, 1, worker="w2")
    assert await queue.claims.settle("w2", again.job.id, again.epoch, outcome)
    assert not await queue.claims.settle("w1", first.job.id, first.epoch, outcome)
    assert await queue.api_keys.spent() == {"a": Spent(1.0, 1.0)}


@pytest.mark.parametrize("day", DAYS)
async def test_scripts_and_reads_count_the_same_months(queue: Queue, day: str) -> None:
    """Also of leap years; a month resets when the next one begins."""
    start = datetime.fromisoformat(day).replace(tzinfo=UTC)
    now_s = int(start.timestamp()) + 86_399
    part = (FOLDER / "tenants" / "spending.lua").read_text("utf-8")
    whole = "local function whole(number) return string.format('%.0f', number) end"
    read = "local of = periods(tonumber(ARGV[1])); return {of[1].hash, of[2].hash, of[2].ends}"
    script = "\n".join((lua_keys(part), whole, part, read))
    of_day, of_month, ends_ms = await queue.client.redis.eval(script, 1, "p:", now_s * 1000)
    assert {"day": of_day, "month": of_month} == {
        period: f"p:spent:{period}|{number}" for period, number in present_periods(now_s).items()
    }
    year, month = divmod(12 * start.year + start.month, 12)
    assert ends_ms == datetime(year, month + 1, 1, tzinfo=UTC).timestamp() * 1000
