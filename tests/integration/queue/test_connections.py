"""Connections: bounded waits, no unsafe repetition, no lost claims."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.queue import claim_ids, put
from harness.waiting import wait_until
from redis.asyncio import Redis
from structlog.testing import capture_logs

from api.chores import rq_queue
from shared.config.settings import Settings
from shared.errors import ConfigurationError, IncompatibleRedis, RedisUnavailable, ScriptFailed
from shared.queue import Queue, Submission
from shared.queue.connections import pools

Make = Callable[..., Submission]
Eventually = Callable[..., Awaitable[None]]


@pytest.fixture
async def own_queue(durable_server: Any, settings_for: Callable[..., Settings]) -> AsyncIterator[Queue]:
    """A queue on its own server, which can be paused."""
    queue = Queue.connect(settings_for(durable_server.url))
    yield queue
    await queue.close()


async def test_a_good_redis_passes(queue: Queue) -> None:
    """Twice, for the second process to start."""
    await queue.check()
    await queue.check()


@pytest.fixture
def socket_file(durable_server: Any, tmp_path: Path) -> Iterator[Path]:
    """The file of a Redis without a port."""
    path = tmp_path / "s"
    options = ("--port", "0", "--unixsocket", str(path), "--dir", str(tmp_path), "--save", "")
    with subprocess.Popen([durable_server.executable, *options], stdout=subprocess.DEVNULL) as server:
        wait_until(path.exists, "the socket file exists")
        yield path
        server.terminate()


async def test_a_redis_behind_a_socket_file_is_used(socket_file: Path, settings_for: Callable[..., Settings]) -> None:
    queue = Queue.connect(settings_for(f"unix://{socket_file}"))
    await queue.check()
    assert await queue.client.blocking.ping()
    await queue.close()


@pytest.mark.parametrize("url", ["rediss://127.0.0.1:9", "unix:///none"])
async def test_every_kind_of_url_is_connected_to(settings_for: Callable[..., Settings], url: str) -> None:
    """Nothing responds at these; TLS needs a server with a certificate."""
    queue = Queue.connect(settings_for(url))
    with pytest.raises(RedisUnavailable, match="cannot reach Redis"):
        await queue.check()
    await queue.close()


@pytest.mark.parametrize(("query", "option"), [("socket_timeout=x", "socket_timeout"), ("timeout=5", "timeout")])
def test_an_option_of_the_url_that_is_invalid_names_the_variable(
    settings_for: Callable[..., Settings], query: str, option: str
) -> None:
    url = f"redis://127.0.0.1:9?{query}"
    with pytest.raises(ConfigurationError, match=f"FUSEQUEUE_REDIS_URL: .*{option}"):
        Queue.connect(settings_for(url))
    with pytest.raises(ConfigurationError, match=f"FUSEQUEUE_REDIS_URL: .*{option}"):
        rq_queue.connect(settings_for(url))
    with pytest.raises(ConfigurationError, match=f"FUSEQUEUE_RQ_REDIS_URL: .*{option}"):
        rq_queue.connect(settings_for("redis://127.0.0.1:9", rq_redis_url=url))


async def test_a_fault_of_a_script_is_no_outage(queue: Queue, make_submission: Make) -> None:
    """Repeating the call gives the same error: the caller gets an internal error, without the text of the script."""
    await queue.client.redis.set(queue.client.redis_keys.queued_jobs, "not a hash")
    with pytest.raises(ScriptFailed, match="WRONGTYPE") as failed:
        await queue.jobs.submit([make_submission()])
    assert (failed.value.code, failed.value.retryable, failed.value.public) == (
        "internal_error",
        False,
        "internal error",
    )
    await queue.client.redis.delete(queue.client.redis_keys.queued_jobs)


async def test_a_redis_that_evicts_is_refused(own_queue: Queue) -> None:
    """It could lose jobs; the error names the command that helps."""
    await own_queue.client.redis.config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(IncompatibleRedis, match="CONFIG SET maxmemory-policy noeviction"):
        await own_queue.check()
    await own_queue.client.redis.config_set("maxmemory-policy", "noeviction")
    await own_queue.check()


async def test_a_redis_without_an_append_only_file_is_used_with_a_warning(own_queue: Queue) -> None:
    """A development Redis works; each process logs once that a restart loses the jobs."""
    with capture_logs() as logs:
        await own_queue.check()
        assert own_queue.client.durability_warning == ""
        await own_queue.client.redis.config_set("appendonly", "no")
        await own_queue.check()
        await own_queue.check()
        assert "a restart loses the jobs" in own_queue.client.durability_warning
    assert [(entry["event"], entry["log_level"]) for entry in logs] == [("redis_not_durable", "warning")]


async def test_a_redis_without_info_is_accepted(own_queue: Queue) -> None:
    """Some services do not allow INFO."""
    await own_queue.client.redis.execute_command("ACL", "SETUSER", "default", "-info")
    await own_queue.check()
    await own_queue.client.redis.execute_command("ACL", "SETUSER", "default", "+info")


async def test_an_unreachable_redis_is_reported(settings_for: Callable[..., Settings], make_submission: Make) -> None:
    """Every call raises `RedisUnavailable` soon."""
    queue = Queue.connect(settings_for("redis://127.0.0.1:1/0"))
    calls: list[Awaitable[Any]] = [
        queue.check(),
        queue.jobs.submit([make_submission()]),
        queue.jobs.get("job_1"),
        queue.jobs.get_many(["job_1"]),
        queue.jobs.page("default"),
        queue.claims.claim("w1", ["demo"], 1),
        queue.wakeups.wait("w1", 1),
        queue.workers.all(),
        queue.maintenance.reconcile(),
    ]
    for call in calls:
        async with asyncio.timeout(20):
            with pytest.raises(RedisUnavailable):
                await call
    await queue.close()


async def test_a_burst_waits_for_connections(own_queue: Queue, make_submission: Make) -> None:
    """More concurrent calls than connections are no outage: each is served in turn."""
    one = make_submission()
    await own_queue.jobs.submit([one])
    answers = await asyncio.gather(*(own_queue.jobs.get(one.job.id) for _ in range(8 * pools.CONNECTIONS)))
    assert {answer and answer.job.id for answer in answers} == {one.job.id}
    assert len(await own_queue.client.redis.client_list()) <= pools.CONNECTIONS + 1


async def test_a_hung_redis_times_out(
    own_queue: Queue,
    durable_server: Any,
    make_submission: Make,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A hung server holds a caller for two timeouts at most, and a canceled submit is safe to repeat."""
    monkeypatch.setattr(pools, "COMMAND_TIMEOUT_S", 0.2)
    impatient = Queue.connect(own_queue.client.settings)

    async def connected() -> bool:
        with contextlib.suppress(RedisUnavailable):
            await impatient.check()
            return True
        return False

    await eventually(connected, "a connection is there, which then hangs")
    one = make_submission()
    durable_server.pause()
    began = asyncio.get_running_loop().time()
    with pytest.raises(RedisUnavailable):
        await impatient.jobs.submit([one])
    assert asyncio.get_running_loop().time() - began < 8, "two timeouts as they are by default would be ten"
    durable_server.resume()
    assert await put(own_queue, one) == [one.job.id]
    assert await claim_ids(own_queue) == [one.job.id]
    await impatient.close()


async def test_clients_are_set_as_measured(settings_for: Callable[..., Settings]) -> None:
    """The blocking read ends before its socket times out; retries and health checks are set, not defaults."""
    queue = Queue.connect(settings_for("redis://127.0.0.1:1/0"))
    commands = queue.client.redis.connection_pool.connection_kwargs
    blocking = queue.client.blocking.connection_pool.connection_kwargs
    assert commands["socket_timeout"] <= 5
    assert commands["retry"].get_retries() <= 1
    assert blocking["socket_timeout"] > pools.MAX_BLOCK_MS / 1000 + 1
    assert blocking["retry"].get_retries() == 0
    assert commands["health_check_interval"] > 0
    assert blocking["health_check_interval"] > 0
    await queue.close()


async def test_a_canceled_claim_is_released(queue: Queue, make_submission: Make, eventually: Eventually) -> None:
    """Canceled at any moment, a claim leaves no job stranded until its lease ends."""
    (job_id,) = await put(queue, make_submission())
    other = Queue.connect(queue.client.settings)
    for delay in range(60):
        claiming = asyncio.create_task(queue.claims.claim("w1", ["demo"], 1))
        for _ in range(delay % 20):
            await asyncio.sleep(0)
        claiming.cancel()
        try:
            for one in await claiming:
                await queue.claims.release("w1", {one.job.id: one.epoch})
        except asyncio.CancelledError:
            pass

        async def waiting() -> bool:
            record = await other.jobs.get(job_id)
            return record is not None and record.state == "queued" and not queue.claims.unfinished

        await eventually(waiting, "the job is queued again")
    assert await claim_ids(other) == [job_id]
    await other.close()


async def test_scripts_that_redis_forgot_are_loaded_again(own_queue: Queue, make_submission: Make) -> None:
    """After a restart, or SCRIPT FLUSH."""
    await put(own_queue, make_submission())
    await own_queue.client.redis.script_flush()
    await put(own_queue, make_submission())
    await own_queue.client.redis.script_flush()
    assert len(await claim_ids(own_queue)) == 2


async def test_a_wait_survives_a_flush(queue: Queue, make_submission: Make) -> None:
    """The wake-ups can disappear under a reader."""
    await queue.wakeups.list_as_waiting("w1", ["demo"], wait_s=60)
    waiting = asyncio.create_task(queue.wakeups.wait("w1", 0.2))
    await asyncio.sleep(0.02)
    await queue.client.redis.delete(queue.client.redis_keys.wakeup("w1"), queue.client.redis_keys.waiting("w1"))
    await waiting


async def test_another_clients_settings_do_not_matter(queue: Queue, make_submission: Make) -> None:
    """Replies are text, whatever bytes Redis holds."""
    raw = Redis.from_url(queue.client.settings.redis_url)
    await raw.hset(queue.client.redis_keys.job("job_odd"), mapping={"job": b"\xff", "state": b"\xfe"})
    await raw.pexpire(queue.client.redis_keys.job("job_odd"), 60_000)
    assert await queue.jobs.get("job_odd") is None
    await raw.aclose()
