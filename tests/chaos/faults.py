"""The faults of a plan: each is a function that happens to a running stack and leaves it whole."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import signal
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import redis
from harness.tcp_proxy import TcpProxy, script_pattern

from chaos import hooks
from chaos.monitor import Monitor
from chaos.processes import Cluster, Process, RedisProcess, wait_for
from chaos.sleeping_engine import read_journal
from shared.queue import Queue

Action = Callable[["Stage", random.Random], Awaitable[None]]
HOOK_TIMEOUT_S = 30.0

INDEXES = (
    *("ready", "lanes", "signature", "front", "solo", "dated", "returned"),
    *("lane_order", "tenant_order", "tenant_signatures", "paused_jobs", "later_jobs", "children", "dependents"),
)
"""Families of keys that reconciling makes from the jobs' records and lanes."""


class Stage:
    """What faults happen to. `proxies` are by client and server, such as `worker-redis`."""

    def __init__(self, cluster: Cluster, monitor: Monitor) -> None:
        self.cluster = cluster
        self.monitor = monitor
        self.proxies: Mapping[str, TcpProxy] = {}
        self.lost_pids: set[int] = set()
        """Workers that were killed or stopped, or terminated with jobs that go on elsewhere."""
        self._taken: set[int] = set()
        self.exits: list[str] = []
        self.forgetting: Callable[[], None] = lambda: None
        """Called when Redis forgets all jobs."""
        self.switched: Callable[[int], None] = lambda port: None
        """Called with the port of a promoted replica."""

    def any(self, role: str, rng: random.Random) -> Process | None:
        """Return a process that no other fault has; None if there is none."""
        free = [process for process in self.cluster.alive(role) if process.pid not in self._taken]
        return self._take(rng.choice(free)) if free else None

    def hooked(self, role: str, name: str, rng: random.Random, number: int = signal.SIGKILL) -> Process:
        """Start a process that sends itself a signal at a hook."""
        return self._take(self.cluster.process(role, **hooks.hook(name, rng.randint(1, 3), number)))

    def _take(self, process: Process) -> Process:
        self._taken.add(process.pid)
        return process

    @property
    def lease_s(self) -> float:
        return self.cluster.settings().lease_ms / 1000


async def kill_worker(stage: Stage, rng: random.Random) -> None:
    """Kill a worker at any moment, and start another."""
    if process := stage.any("worker", rng):
        stage.lost_pids.add(process.pid)
        process.send(signal.SIGKILL)
        await process.ended()
    stage.cluster.process("worker")


async def kill_at(name: str, stage: Stage, rng: random.Random) -> None:
    """Kill a worker when it reaches a hook."""
    process = stage.hooked("worker", name, rng)
    await process.ended(HOOK_TIMEOUT_S)
    stage.lost_pids.add(process.pid)


async def kill_api(name: str, stage: Stage, rng: random.Random) -> None:
    """Kill the API between the request and the response of a submit, and start it again."""
    for process in stage.cluster.alive("api"):
        process.send(signal.SIGKILL)
        await process.ended()
    process = stage.hooked("api", name, rng)
    with contextlib.suppress(TimeoutError):
        await process.ended(HOOK_TIMEOUT_S)
    if process.send(signal.SIGKILL):
        await process.ended()
    stage.cluster.process("api")


async def stop_worker(stage: Stage, rng: random.Random) -> None:
    """Stop a worker until its leases have expired and its jobs have other workers, and wake it."""
    if process := stage.any("worker", rng):
        stage.lost_pids.add(process.pid)
        process.send(signal.SIGSTOP)
        stage.cluster.process("worker")
        await asyncio.sleep(stage.lease_s * rng.uniform(1.3, 2.0))
        process.send(signal.SIGCONT)
        await asyncio.sleep(0.5)  # what it held is written or dropped by now
        await _drain(stage, process)


async def stop_at(name: str, stage: Stage, rng: random.Random) -> None:
    """Stop a worker when it reaches a hook, and wake it when another worker has ended its job."""
    process = stage.hooked("worker", name, rng, signal.SIGSTOP)
    await wait_for(process.is_stopped, f"a worker reaches {name}", HOOK_TIMEOUT_S)
    stage.lost_pids.add(process.pid)
    await _outlived(stage, process)
    process.send(signal.SIGCONT)
    await asyncio.sleep(0.5)
    await _drain(stage, process)


async def drain_worker(stage: Stage, rng: random.Random) -> None:
    """Terminate a worker, and start another."""
    if process := stage.any("worker", rng):
        stage.cluster.process("worker")
        await _drain(stage, process)


async def evict_worker(stage: Stage, rng: random.Random) -> None:
    """Terminate a worker whose jobs can take longer than its drain, as a node that ends does; start another."""
    if process := stage.any("worker", rng):
        stage.lost_pids.add(process.pid)
        await _drain(stage, process)
    stage.cluster.process("worker")


async def _outlived(stage: Stage, process: Process) -> None:
    """Wait until others have ended the jobs of a stopped worker."""
    await asyncio.sleep(stage.lease_s * 1.3)
    jobs = {forward.job_id for forward in read_journal(stage.cluster.journal) if forward.pid == process.pid}
    await wait_for(lambda: jobs <= stage.monitor.ends.keys(), "jobs of a stopped worker end elsewhere")


async def _drain(stage: Stage, process: Process) -> None:
    process.send(signal.SIGTERM)
    status = await process.ended()
    if status not in (0, -signal.SIGTERM):  # that signal ends a worker whose start has not come to its handler
        stage.exits.append(f"worker {process.pid}: exit status {status}")


async def kill_redis(stage: Stage, rng: random.Random) -> None:
    """Kill redis-server and start it again, less than a lease later."""
    await _outage(stage, rng.uniform(0.0, 0.3) * stage.lease_s)


async def long_outage(stage: Stage, rng: random.Random) -> None:
    """Kill redis-server and start it again two leases later."""
    await _outage(stage, 2 * stage.lease_s)


async def _outage(stage: Stage, seconds: float) -> None:
    stage.cluster.redis.kill()
    await asyncio.sleep(seconds)
    stage.cluster.redis.start()
    await stage.cluster.redis.started()


async def freeze_redis(stage: Stage, rng: random.Random) -> None:
    """Stop redis-server for two leases: connections stay, and nothing is answered."""
    stage.cluster.redis.send(signal.SIGSTOP)
    await asyncio.sleep(2 * stage.lease_s)
    stage.cluster.redis.send(signal.SIGCONT)


async def out_of_memory(seconds: str, stage: Stage, rng: random.Random) -> None:
    """Give Redis less memory than it uses."""
    with stage.cluster.redis.client as client:
        client.config_set("maxmemory", "1mb")
        await asyncio.sleep(float(seconds))
        client.config_set("maxmemory", "0")


async def step_clock(stage: Stage, rng: random.Random) -> None:
    """Step the clock of redis-server back or forth, by many leases; needs libfaketime."""
    clock = stage.cluster.redis.clock
    clock.write_text(f"{rng.choice('+-')}{rng.uniform(1, 10) * stage.lease_s:.1f}")
    await asyncio.sleep(2 * stage.lease_s)


async def rewrite_aof(stage: Stage, rng: random.Random) -> None:
    with stage.cluster.redis.client as client, contextlib.suppress(redis.ResponseError):  # one is in progress
        client.bgrewriteaof()


async def flush_scripts(stage: Stage, rng: random.Random) -> None:
    with stage.cluster.redis.client as client:
        client.script_flush()


async def flush_all(stage: Stage, rng: random.Random) -> None:
    """Lose all of Redis; new jobs then end."""
    with stage.cluster.redis.client as client:
        client.flushall()
    stage.forgetting()
    ended = len(stage.monitor.ends)
    await wait_for(lambda: len(stage.monitor.ends) > ended + 200, "new jobs end")


async def lose_indexes(stage: Stage, rng: random.Random) -> None:
    """Delete the indexes that can be made from the records again, and reconcile."""
    keys = stage.cluster.keys
    with stage.cluster.redis.client as client:
        names = [keys.leases, keys.signatures, keys.queued_jobs, keys.running_slots, keys.claimed_jobs, keys.paused]
        names.append(keys.later)
        for family in INDEXES:
            names += client.scan_iter(match=f"{keys.prefix}{family}:*", count=1000)
        client.delete(*names)
    await reconcile(stage.cluster)


async def reconcile(cluster: Cluster) -> None:
    """Do what the chores do every ten minutes."""
    queue = Queue.connect(cluster.settings())
    try:
        await queue.maintenance.reconcile()
    finally:
        await queue.close()


async def promote_replica(stage: Stage, rng: random.Random) -> None:
    """Kill redis-server and switch its stable address to a replica that is in step."""
    old, new = stage.cluster.redis, RedisProcess(stage.cluster.folder / f"redis-{rng.randrange(10**9)}")
    new.start("--replicaof", "127.0.0.1", str(old.port))
    await new.started()
    with old.client as client, new.client as replica:
        while replica.info("replication")["master_link_status"] != "up":
            await asyncio.sleep(0.05)
        client.execute_command("CLIENT", "PAUSE", "500", "WRITE")  # what is acknowledged is replicated
        await asyncio.sleep(0.3)
        old.kill()
        replica.execute_command("REPLICAOF", "NO", "ONE")
    stage.cluster.redis = new
    stage.switched(new.port)
    for name, proxy in stage.proxies.items():
        if name.endswith("-redis"):
            proxy.target_port = new.port
            proxy.cut()
    await reconcile(stage.cluster)


async def restart_chores(stage: Stage, rng: random.Random) -> None:
    """Kill the chores worker and start another."""
    for process in stage.cluster.alive("chores"):
        process.send(signal.SIGKILL)
        await process.ended()
    stage.cluster.process("chores")


async def stop_s3(stage: Stage, rng: random.Random) -> None:
    """Let S3 hang for longer than the timeout of a request."""
    stage.cluster.send_s3(signal.SIGSTOP)
    await asyncio.sleep(rng.uniform(1, 2) * stage.cluster.settings().storage_timeout_s)
    stage.cluster.send_s3(signal.SIGCONT)


async def fail_s3(stage: Stage, rng: random.Random) -> None:
    """Let S3 respond to every request with 500."""

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            await writer.drain()
            writer.close()

    proxy = stage.proxies["worker-s3"]
    async with await asyncio.start_server(respond, "127.0.0.1", 0) as server:
        port, proxy.target_port = proxy.target_port, server.sockets[0].getsockname()[1]
        proxy.cut()
        await asyncio.sleep(rng.uniform(1, 4))
        proxy.target_port = port
        proxy.cut()


async def fill_disk(stage: Stage, rng: random.Random) -> None:
    """Refuse to write results for some seconds."""
    stage.cluster.disk_full.touch()
    await asyncio.sleep(rng.uniform(1, 3))
    stage.cluster.disk_full.unlink()


async def delay(name: str, stage: Stage, rng: random.Random) -> None:
    """Delay what passes between two processes."""
    proxy = stage.proxies[name]
    proxy.delay_s = rng.uniform(0.01, 0.2)
    await asyncio.sleep(rng.uniform(0.5, 2))
    proxy.delay_s = 0.0


async def cut(name: str, stage: Stage, rng: random.Random) -> None:
    """Reset all connections between two processes, and refuse new ones for a moment."""
    proxy = stage.proxies[name]
    proxy.refusing = True
    proxy.cut()
    await asyncio.sleep(rng.uniform(0, 1))
    proxy.refusing = False


async def half_close(name: str, stage: Stage, rng: random.Random) -> None:
    stage.proxies[name].half_close()


async def drop_replies(name: str, script: str, stage: Stage, rng: random.Random) -> None:
    """Lose the replies to a script that Redis has applied."""
    pattern = script_pattern(script, stage.cluster.settings(name.partition("-")[0]))
    stage.proxies[name].drop_replies(pattern, rng.randint(1, 4), "cut")


async def drop_s3_replies(stage: Stage, rng: random.Random) -> None:
    """Lose the replies to uploads that S3 has stored."""
    stage.proxies["worker-s3"].drop_replies(b"PUT /", rng.randint(1, 4), "cut")


def _variants(name: str, action: Callable[..., Any], *values: tuple[str, ...]) -> dict[str, Action]:
    return {":".join((name, *each)): functools.partial(action, *each) for each in values}


_LINKS = (("api-redis",), ("worker-redis",))
FAULTS: dict[str, Action] = {
    **{
        action.__name__: action
        for action in (kill_worker, stop_worker, drain_worker, evict_worker, kill_redis, long_outage, freeze_redis)
    },
    **{action.__name__: action for action in (rewrite_aof, step_clock, flush_scripts, flush_all)},
    **{action.__name__: action for action in (lose_indexes, promote_replica, restart_chores, stop_s3, fill_disk)},
    **{action.__name__: action for action in (fail_s3, drop_s3_replies)},
    **_variants("out_of_memory", out_of_memory, ("5",), ("30",)),
    **_variants("kill_at", kill_at, *((name,) for name in hooks.WORKER_HOOKS)),
    **_variants("stop_at", stop_at, *((name,) for name in hooks.WORKER_HOOKS)),
    **_variants("kill_api", kill_api, *((name,) for name in hooks.API_HOOKS)),
    **_variants("delay", delay, *_LINKS, ("worker-s3",)),
    **_variants("cut", cut, *_LINKS, ("worker-s3",)),
    **_variants("half_close", half_close, *_LINKS, ("worker-s3",)),
    **_variants("drop_replies", drop_replies, ("api-redis", "submit"), ("api-redis", "cancel_jobs")),
    **_variants(
        "drop_replies", drop_replies, *(("worker-redis", one) for one in ("read_order", "take", "settle", "renew"))
    ),
}
