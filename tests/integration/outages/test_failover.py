"""A failover behind one name: the old primary stays reachable as a replica, and connections to it stay open."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import EXECUTABLES, RedisServer
from harness.queue import claim, end, put
from harness.tcp_proxy import TcpProxy
from redis import Redis
from rq import Queue as RqQueue

from api.chores import rq_queue
from shared.config.settings import Settings
from shared.errors import RedisUnavailable
from shared.job import Phase, State
from shared.job_record import Progress
from shared.queue import EventFeed, JobEvent, ProgressReport, Queue, Submission

Make = Callable[..., Submission]
Eventually = Callable[..., Awaitable[None]]


@dataclass
class Failover:
    """A primary and its replica behind one name, which is the port of `proxy`."""

    primary: Redis
    replica: Redis
    primary_port: int
    replica_port: int
    proxy: TcpProxy

    def promote(self) -> None:
        """Make the replica the primary, and the primary its replica."""
        self.replica.replicaof("NO", "ONE")
        self.primary.replicaof("127.0.0.1", str(self.replica_port))

    def switch_name(self) -> None:
        """Lead new connections to the new primary; open ones stay where they are."""
        self.proxy.target_port = self.replica_port


@pytest.fixture
async def failover(tmp_path: Path, eventually: Eventually) -> AsyncIterator[Failover]:
    if not EXECUTABLES:
        pytest.skip("no redis-server")
    with contextlib.ExitStack() as stack:
        servers, clients = [], []
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            server = RedisServer(EXECUTABLES[min(EXECUTABLES)], tmp_path / name)
            server.start()
            stack.callback(server.stop)
            client = stack.enter_context(Redis.from_url(server.url, decode_responses=True))
            client.config_set("repl-diskless-sync-delay", 0)
            servers.append(server)
            clients.append(client)
        clients[1].replicaof("127.0.0.1", str(servers[0].port))
        await eventually(lambda: clients[1].info("replication")["master_link_status"] == "up", "the replica is synced")
        async with TcpProxy(servers[0].port) as proxy:
            yield Failover(clients[0], clients[1], servers[0].port, servers[1].port, proxy)


async def synced(failover: Failover) -> None:
    """Wait until the replica has every write.

    WAIT covers the writes before its connection's previous command, hence the PING.
    """
    commands = failover.primary.pipeline(transaction=False)
    commands.ping().wait(1, 10_000)
    assert (await asyncio.to_thread(commands.execute))[-1] == 1


async def test_no_submit_fails_after_a_failover(
    failover: Failover, settings_for: Callable[..., Settings], make_submission: Make
) -> None:
    """Each connection of the pool leaves the old primary, and the call is repeated on the new one."""
    queue = Queue.connect(settings_for(failover.proxy.redis_url))
    await asyncio.gather(*(put(queue, make_submission()) for _ in range(20)))
    await synced(failover)
    failover.promote()
    failover.switch_name()
    before = len(failover.proxy.connections)
    await asyncio.gather(*(put(queue, make_submission()) for _ in range(40)))
    (depth,) = await queue.workers.queue_depths()
    assert depth.queued_jobs == 60
    assert before > 5
    assert "slave" in failover.primary.role()
    await queue.close()


async def test_a_pool_recovers_when_the_name_follows_late(
    failover: Failover, settings_for: Callable[..., Settings], make_submission: Make
) -> None:
    """Until then calls fail as if Redis was away."""
    queue = Queue.connect(settings_for(failover.proxy.redis_url))
    await put(queue, make_submission())
    await synced(failover)
    failover.promote()
    for _ in range(3):
        with pytest.raises(RedisUnavailable):
            await put(queue, make_submission())
    failover.switch_name()
    await put(queue, make_submission())
    assert len(await claim(queue)) == 2
    await queue.close()


async def test_a_replica_is_not_ready(
    failover: Failover, settings_for: Callable[..., Settings], make_submission: Make
) -> None:
    """An API process whose server has become a replica is not ready until it has left it."""
    queue = Queue.connect(settings_for(failover.proxy.redis_url))
    await queue.check()
    await synced(failover)
    failover.promote()
    with pytest.raises(RedisUnavailable, match="replica"):
        await queue.check()
    failover.switch_name()
    await queue.check()
    await put(queue, make_submission())
    await queue.close()


async def test_subscribers_follow_a_failover(
    failover: Failover, settings_for: Callable[..., Settings], make_submission: Make, eventually: Eventually
) -> None:
    """The event feed and progress come from the new primary, although this process writes nothing."""
    reader, writer = (Queue.connect(settings_for(failover.proxy.redis_url, namespace="one")) for _ in range(2))
    (job_id,) = await put(writer, make_submission())
    seen: list[JobEvent] = []

    async def read(events: AsyncIterator[JobEvent]) -> None:
        async for event in events:
            seen.append(event)

    async with EventFeed(reader) as feed, feed.subscribe(job_id) as events:
        reading = asyncio.create_task(read(events))
        await eventually(lambda: len(seen) == 1, "the present state arrives")
        await synced(failover)
        failover.promote()
        failover.switch_name()
        failover.primary.replicaof("127.0.0.1", "1")  # it gets nothing more
        (one,) = await claim(writer)
        report = ProgressReport(one.job.id, one.epoch, Phase.DENOISING, Progress(step=3, total=8))

        async def progressed() -> bool:
            await writer.claims.report_progress(report)
            return any(event.kind == "progress" for event in seen)

        await eventually(progressed, "progress arrives", 60)
        assert await end(writer, one)
        await asyncio.wait_for(reading, 60)
    assert seen[-1].state is State.SUCCEEDED
    await reader.close()
    await writer.close()


def chores_worker(settings: Settings, objects: Path) -> subprocess.Popen[bytes]:
    """Start a chores worker."""
    changes = {"redis_url": settings.redis_url, "namespace": settings.namespace, "storage_dir": str(objects)}
    env = {**os.environ, **{f"FUSEQUEUE_{name.upper()}": value for name, value in changes.items()}}
    return subprocess.Popen([sys.executable, "-m", "api.chores"], env=env)


async def test_waiting_chores_follow_a_failover(
    failover: Failover,
    settings_for: Callable[..., Settings],
    make_submission: Make,
    tmp_path: Path,
    eventually: Eventually,
) -> None:
    """A chores worker that waits for its queue, and its schedule, continue on the new primary."""
    settings = settings_for(failover.proxy.redis_url)
    queue = Queue.connect(settings)
    process = chores_worker(settings, tmp_path / "objects")
    try:

        async def idle() -> bool:
            with Redis.from_url(f"redis://127.0.0.1:{failover.primary_port}") as plain:
                return "blpop" in str(plain.client_list()) or "blmove" in str(plain.client_list())

        await eventually(idle, "the chores worker waits", 60)
        await synced(failover)
        failover.promote()
        failover.switch_name()
        (job_id,) = await put(queue, make_submission())
        await claim(queue)
        await queue.client.redis.zadd(queue.client.redis_keys.leases, {job_id: 1})

        async def reclaimed() -> bool:
            record = await queue.jobs.get(job_id)
            return record is not None and record.state is State.QUEUED

        await eventually(reclaimed, "a chore runs on the new primary", 60)
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, 60)
        await queue.close()


async def test_chores_follow_a_failover(
    failover: Failover, settings_for: Callable[..., Settings], eventually: Eventually
) -> None:
    """rq's own connections leave the old primary as well."""
    settings = settings_for(failover.proxy.redis_url)
    with rq_queue.connect(settings) as connection:
        queue: RqQueue = rq_queue.rq_queue(settings, connection, rq_queue.ChoreQueue.UPKEEP)
        assert await asyncio.to_thread(rq_queue.enqueue, queue, rq_queue.MOVE_ON, chore_id="before", start_within_s=60)
        await synced(failover)
        failover.promote()
        failover.switch_name()
        assert await asyncio.to_thread(rq_queue.enqueue, queue, rq_queue.MOVE_ON, chore_id="after", start_within_s=60)
        assert len(await asyncio.to_thread(lambda: queue.job_ids)) == 2
