"""A Redis Cluster: the queue finds the primary of its namespace's slot from any node, and follows the slot."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import EXECUTABLES, RedisServer
from harness.ports import free_port
from harness.queue import claim, end, put, state_of
from redis import Redis
from redis.exceptions import ResponseError

from shared.config.settings import Settings
from shared.errors import RedisUnavailable
from shared.job import State
from shared.queue import EventFeed, JobEvent, Queue, Submission
from shared.queue.redis_keys import RedisKeys

Make = Callable[..., Submission]
Eventually = Callable[..., Awaitable[None]]
Connect = Callable[["Node"], Queue]

CHORES = (sys.executable, "-m", "api.chores")
BUS = 10_000
"""From a node's port to that on which the nodes talk."""


@dataclass
class Node:
    """One process of a cluster, and a client of it."""

    server: RedisServer
    redis: Redis

    def run(self, *command: str | int) -> str:
        return str(self.redis.execute_command("CLUSTER", *command))


@pytest.fixture
async def nodes(tmp_path: Path, eventually: Eventually) -> AsyncIterator[list[Node]]:
    """Three nodes that know each other; the first one owns all slots."""
    if not EXECUTABLES:
        pytest.skip("no redis-server")
    with ExitStack() as stack:
        found = []
        for name in "abc":
            (tmp_path / name).mkdir()
            options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
            server = RedisServer(EXECUTABLES[min(EXECUTABLES)], tmp_path / name, options=options)
            server.port = free_port(next_at=BUS)
            server.start()
            stack.callback(server.stop)
            client = stack.enter_context(Redis.from_url(server.url, decode_responses=True))
            client.config_set("repl-diskless-sync-delay", 0)
            found.append(Node(server, client))
        found[0].run("ADDSLOTS", *range(16384))
        for epoch, node in enumerate(found, 1):
            node.run("SET-CONFIG-EPOCH", epoch)
        for node in found[1:]:
            node.run("MEET", "127.0.0.1", found[0].server.port)

        def agreed() -> bool:
            infos = [node.redis.execute_command("CLUSTER INFO") for node in found]
            return all(info["cluster_state"] == "ok" and info["cluster_known_nodes"] == "3" for info in infos)

        await eventually(agreed, "the nodes know each other")
        yield found


@pytest.fixture
async def connect(settings_for: Callable[..., Settings]) -> AsyncIterator[Connect]:
    """Return a queue whose URL names a node."""
    queues: list[Queue] = []

    def build(node: Node) -> Queue:
        queues.append(Queue.connect(settings_for(node.server.url)))
        return queues[-1]

    yield build
    for queue in queues:
        await queue.close()


def move_slot(keys: RedisKeys, source: Node, target: Node, *others: Node) -> None:
    """Move the slot of a namespace with its keys, as `redis-cli --cluster reshard` does."""
    slot, port = int(source.run("KEYSLOT", keys.prefix)), target.server.port
    target.run("SETSLOT", slot, "IMPORTING", source.run("MYID"))
    source.run("SETSLOT", slot, "MIGRATING", target.run("MYID"))
    while names := source.redis.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100):
        source.redis.execute_command("MIGRATE", "127.0.0.1", port, "", 0, 5000, "KEYS", *names)
    for node in (target, source, *others):
        with suppress(ResponseError):  # a primary that has lost its last slot becomes a replica
            node.run("SETSLOT", slot, "NODE", target.run("MYID"))


@pytest.mark.parametrize("at", [0, 1])
async def test_the_queue_works_through_any_node(
    nodes: list[Node], connect: Connect, make_submission: Make, at: int
) -> None:
    queue = connect(nodes[at])
    await queue.check()
    (job_id,) = await put(queue, make_submission())
    async with EventFeed(queue) as feed, feed.subscribe(job_id) as events:
        (one,) = await claim(queue)
        assert not (await queue.claims.renew("w1", {job_id: one.epoch})).lost
        assert await end(queue, one)
        seen: list[JobEvent] = [event async for event in events]
    assert seen[-1].state is State.SUCCEEDED


async def test_a_slot_that_moves_is_followed(nodes: list[Node], connect: Connect, make_submission: Make) -> None:
    """Twice: jobs that were queued before are claimed after it."""
    queue = connect(nodes[0])
    await put(queue, make_submission())
    first, second, third = nodes
    move_slot(queue.client.redis_keys, first, second, third)
    await put(queue, make_submission())
    move_slot(queue.client.redis_keys, second, third, first)
    await asyncio.gather(*(put(queue, make_submission()) for _ in range(20)))
    (depth,) = await queue.workers.queue_depths()
    assert depth.queued_jobs == 22
    assert len(await claim(queue)) == 8


async def test_while_a_slot_moves_the_queue_is_unavailable(
    nodes: list[Node], connect: Connect, make_submission: Make
) -> None:
    """No script runs with a part of the keys: it would find a job without its lane."""
    queue = connect(nodes[0])
    await put(queue, make_submission())
    first, second, _ = nodes
    slot = int(first.run("KEYSLOT", queue.client.redis_keys.prefix))
    second.run("SETSLOT", slot, "IMPORTING", first.run("MYID"))
    first.run("SETSLOT", slot, "MIGRATING", second.run("MYID"))
    before = first.redis.execute_command("CLUSTER", "COUNTKEYSINSLOT", slot)
    with pytest.raises(RedisUnavailable, match="moving this namespace's slot"):
        await put(queue, make_submission())
    with pytest.raises(RedisUnavailable, match="moving this namespace's slot"):
        await claim(queue)
    assert first.redis.execute_command("CLUSTER", "COUNTKEYSINSLOT", slot) == before
    move_slot(queue.client.redis_keys, *nodes)
    assert len(await claim(queue)) == 1


async def test_a_replica_that_takes_over_is_followed(
    nodes: list[Node], connect: Connect, make_submission: Make, eventually: Eventually
) -> None:
    """The URL names a node that lives on; the queue comes back to it when the primary that it was led to is gone."""
    primary, replica, named = nodes
    queue = connect(named)
    await put(queue, make_submission())
    replica.run("REPLICATE", primary.run("MYID"))
    await eventually(lambda: replica.redis.info("replication")["master_link_status"] == "up", "the replica is synced")
    primary.server.kill()
    replica.run("FAILOVER", "TAKEOVER")

    async def submitted() -> bool:
        try:
            await put(queue, make_submission())
        except RedisUnavailable:
            return False
        return True

    await eventually(submitted, "the queue has found the new primary")
    assert len(await claim(queue)) == 2


@pytest.mark.parametrize("rq_url", [None, "redis://127.0.0.1:9"])
async def test_a_cluster_without_a_redis_for_rq_is_a_fault_of_the_deployment(
    nodes: list[Node], settings_for: Callable[..., Settings], rq_url: str | None
) -> None:
    """`fusequeue doctor` says what the chores need before they do."""
    queue = Queue.connect(settings_for(nodes[1].server.url, rq_redis_url=rq_url))
    (trait,) = [one for one in await queue.examine() if one.name == "redis cluster"]
    assert ("FUSEQUEUE_RQ_REDIS_URL" in trait.remedy) is (rq_url is None)
    await queue.close()


def chores_env(node: Node, settings: Settings, **variables: str) -> dict[str, str]:
    """Return the environment of chores whose URL names a node."""
    folder = str(node.server.folder / "objects")
    own = {"REDIS_URL": node.server.url, "NAMESPACE": settings.namespace, "STORAGE_DIR": folder}
    return {**os.environ, **{f"FUSEQUEUE_{name}": value for name, value in own.items()}, **variables}


async def test_chores_do_not_start_with_a_cluster_for_rq(nodes: list[Node], connect: Connect) -> None:
    """rq uses keys of many slots in one command; the error names the setting that gives it a Redis of its own."""
    env = chores_env(nodes[0], connect(nodes[0]).client.settings)
    ended = await asyncio.to_thread(subprocess.run, CHORES, env=env, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "FUSEQUEUE_RQ_REDIS_URL" in ended.stderr + ended.stdout


async def test_chores_run_beside_a_cluster_with_a_redis_of_their_own(
    nodes: list[Node], durable_server: RedisServer, connect: Connect, make_submission: Make, eventually: Eventually
) -> None:
    """A chore works on the queue in the cluster."""
    queue = connect(nodes[1])
    env = chores_env(nodes[2], queue.client.settings, FUSEQUEUE_RQ_REDIS_URL=durable_server.url)
    (job_id,) = await put(queue, make_submission())
    await claim(queue)
    await queue.client.redis.zadd(queue.client.redis_keys.leases, {job_id: 1})
    process = await asyncio.create_subprocess_exec(*CHORES, env=env)

    async def reclaimed() -> bool:
        return await state_of(queue, job_id) is State.QUEUED

    await eventually(reclaimed, "a chore has put the job back", 60)
    process.terminate()
    assert await asyncio.wait_for(process.wait(), 60) == 0
