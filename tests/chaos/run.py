"""One run: a stack, its load, its faults, and the report of the checker."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from harness.tcp_proxy import TcpProxy
from harness.webhook_receiver import WebhookReceiver, receiving

from api.chores import retention
from chaos.checker import PROMISES, Report, check
from chaos.client import Client
from chaos.evidence import collect
from chaos.faults import FAULTS, Stage
from chaos.monitor import Monitor
from chaos.plan import Mix, Plan
from chaos.processes import MAX_BATCH, Cluster, wait_for

TIMEOUT_S = 1800.0
SETTLE_TIMEOUT_S = 60.0
STUCK_S = 180.0
DELIVERY_TIMEOUT_S = 90.0  # what a killed chores worker was delivering is due again after 30 s
SUBMITTERS = 12
LATE_OUTSTANDING = 30
"""Jobs outstanding once the planned number is submitted: enough for the faults that are left to hit some."""


@dataclass(frozen=True)
class Scenario:
    """A kind of run. `run_again` bounds the jobs that run more than once, by the workers killed or stopped.

    `jobs` are at least `fewest`, also at a small scale. With `every_s` one fault happens at these intervals until all
    jobs have ended, and `kinds` are their kinds in turns. `computed` bounds the steps computed over those of results.
    """

    jobs: int
    kinds: Mapping[str, int] = field(default_factory=dict)
    mix: Mix = field(default_factory=Mix)
    workers: int = 4
    step_s: float = 0.05
    at_once: int = 1
    s3: bool = False
    proxied: bool = False
    webhooks: bool = False
    run_again: Callable[[int], float] = lambda kills: kills * MAX_BATCH
    settings: Mapping[str, object] = field(default_factory=dict)
    fewest: int = 50
    every_s: float = 0.0
    checkpoint_s: float = 20.0
    computed: float = math.inf

    def plan(self, seed: int, scale: float = 1.0) -> Plan:
        kinds = {kind: max(1, round(scale * count)) for kind, count in self.kinds.items()}
        return Plan(seed, max(self.fewest, round(scale * self.jobs)), self.mix, kinds)


class Run:
    """Executes a plan."""

    def __init__(self, scenario: Scenario, plan: Plan, folder: Path, bug: str = "") -> None:
        self.scenario, self.plan = scenario, plan
        options = {"step_s": scenario.step_s, "bug": bug, "s3": scenario.s3, "checkpoint_s": scenario.checkpoint_s}
        self.cluster = Cluster(folder, **options, **scenario.settings)
        self.client = Client(f"http://127.0.0.1:{self.cluster.api_port}")
        self.monitor = Monitor(self.cluster.redis.port, self.cluster.keys)
        self.stage = Stage(self.cluster, self.monitor)
        self._faults_left = 0
        self._forgotten = 0  # requests without an end when Redis lost everything

    async def report(self) -> Report:
        """Run everything and return the report; ends all processes."""
        started = time.monotonic()
        try:
            async with contextlib.AsyncExitStack() as stack, asyncio.timeout(TIMEOUT_S):
                if self.scenario.proxied:
                    await self._connect_proxies(stack)
                receiver = await self._start(stack)
                load = asyncio.create_task(self._load())
                await (self._faults_by_clock() if self.scenario.every_s else self._faults())
                await load
                await self._settled(receiver)
                evidence = await asyncio.to_thread(
                    collect,
                    self.cluster,
                    self.client,
                    self.monitor,
                    self.stage.lost_pids,
                    receiver and list(receiver.received),
                )
        finally:
            self.cluster.close()
        report = check(evidence)
        self._judge(report)
        report.counts["replies dropped"] = sum(proxy.dropped for proxy in self.stage.proxies.values())
        report.counts |= {
            "workers killed or stopped": len(self.stage.lost_pids),
            "seconds": round(time.monotonic() - started),
        }
        return report

    def _judge(self, report: Report) -> None:
        bound = self.scenario.run_again(len(self.stage.lost_pids))
        if report.counts["jobs run again"] > bound:
            report.problems["run again"].append(f"{report.counts['jobs run again']} jobs, at most {bound}")
        computed, needed = report.counts["steps computed for them"], report.counts["steps of results"]
        if computed > self.scenario.computed * needed:
            report.problems["steps computed"].append(f"{computed}, at most {self.scenario.computed:g} x {needed}")
        if len(self.client.requests) < self.plan.jobs:
            report.problems["stuck"].append(f"{len(self.client.requests)} of {self.plan.jobs} jobs were submitted")
        for kind, found in (("client", self.client.faults), ("exit status", self.stage.exits)):
            if found:
                report.problems[kind] += found
        assert set(report.problems) <= {*PROMISES, "run again", "steps computed", "stuck", "client", "exit status"}

    async def _connect_proxies(self, stack: contextlib.AsyncExitStack) -> None:
        proxies = {}
        for role, ports in self.cluster.ports.items():
            for server, port in tuple(ports.items()):
                proxy = await stack.enter_async_context(TcpProxy(port))
                proxies[f"{role}-{server}"] = proxy
                ports[server] = proxy.port
        self.stage.proxies = proxies

    async def _start(self, stack: contextlib.AsyncExitStack) -> WebhookReceiver | None:
        receiver = stack.enter_context(receiving()) if self.scenario.webhooks else None
        if receiver is not None:
            self.cluster.change_settings(webhook_ports=str(receiver.port))
        await self.cluster.start(
            self.scenario.workers, chores=self.scenario.webhooks, steps_clock="step_clock" in self.scenario.kinds
        )
        await stack.enter_async_context(self.monitor)
        await stack.enter_async_context(self.client)
        await self.client.ready()
        if receiver is not None:
            await self.client.add_webhook(receiver.url)
        self.monitor.last_end_s = time.monotonic()  # starts can take minutes
        self.stage.forgetting, self.stage.switched = self._forget, self.monitor.switch
        return receiver

    async def _load(self) -> None:
        """Submit jobs until the planned number is reached and no fault is left."""
        submits = self.plan.submits()
        busy: set[asyncio.Task[None]] = set()
        while (len(self.client.requests) < self.plan.jobs or self._faults_left) and not self._stuck():
            late = len(self.client.requests) >= self.plan.jobs
            most = min(self.plan.mix.outstanding, LATE_OUTSTANDING) if late else self.plan.mix.outstanding
            if self._outstanding() < most and len(busy) < SUBMITTERS:
                busy.add(asyncio.create_task(self.client.submit(*next(submits))))
                await asyncio.sleep(0)
            else:
                await asyncio.sleep(0.005)
            for task in [task for task in busy if task.done()]:
                busy.discard(task)
                task.result()
        await asyncio.gather(*busy)
        await self.client.finish()

    def _stuck(self) -> bool:
        """Return whether no job has ended for so long that the run would never end."""
        return time.monotonic() - self.monitor.last_end_s > STUCK_S

    def _outstanding(self) -> int:
        return self._without_end() - self._forgotten

    def _without_end(self) -> int:
        """Return how many jobs can still end; of the requests without a response, some have submitted one."""
        return len(self.client.requests) + self.client.retries - self.client.given_up - len(self.monitor.ends)

    def _forget(self) -> None:
        self.client.forget()
        self._forgotten = self._without_end()

    async def _faults(self) -> None:
        faults = self.plan.faults()
        self._faults_left = len(faults)
        running: set[asyncio.Task[None]] = set()
        for fault in faults:
            while not self._stuck() and (
                len(self.monitor.ends) < fault.at * self.plan.jobs or len(running) >= self.scenario.at_once
            ):
                await asyncio.sleep(0.01)
                for task in [task for task in running if task.done()]:
                    running.discard(task)
                    task.result()
            running.add(asyncio.create_task(self._happen(fault.kind, fault.seed)))
        await asyncio.gather(*running)

    async def _faults_by_clock(self) -> None:
        """Let a fault happen at each interval, until the planned jobs have ended."""
        rng, next_s = random.Random(f"faults {self.plan.seed}"), time.monotonic()
        async with asyncio.TaskGroup() as running:
            for kind in itertools.cycle(self.scenario.kinds):
                next_s += self.scenario.every_s
                await asyncio.sleep(next_s - time.monotonic())
                if self._stuck() or (len(self.client.requests) >= self.plan.jobs and not self._outstanding()):
                    return
                running.create_task(self._happen(kind, rng.randrange(2**32)))

    async def _happen(self, kind: str, seed: int) -> None:
        started = time.monotonic()
        try:
            await FAULTS[kind](self.stage, random.Random(seed))
        except TimeoutError as error:
            self.stage.exits.append(f"{kind}: {error}")
        finally:
            with (self.cluster.folder / "faults.log").open("a") as log:
                log.write(f"{time.time():.1f} {kind} {time.monotonic() - started:.1f} s, {self._outstanding()} open\n")
            self._faults_left = max(0, self._faults_left - 1)

    async def _settled(self, receiver: WebhookReceiver | None) -> None:
        """Wait until every acknowledged job has ended, or nothing has ended for a minute."""
        self.monitor.last_end_s = time.monotonic()
        expected = {name for name, request in self.client.acknowledged.items() if not request.forgotten}
        while expected - self.monitor.ends.keys() and time.monotonic() - self.monitor.last_end_s < SETTLE_TIMEOUT_S:
            await asyncio.sleep(0.05)
        await self.monitor.caught_up()
        await asyncio.sleep(0.3)  # what a stale worker may still write
        if receiver is not None:
            await self._delivered()
        await self._swept()

    async def _delivered(self) -> None:
        """Wait until no webhook is due any more."""
        names = (self.cluster.keys.outbox_tenants, self.cluster.keys.webhook_tenants)
        with self.cluster.redis.client as client, contextlib.suppress(TimeoutError):
            await wait_for(lambda: not client.exists(*names), "all webhooks are delivered", DELIVERY_TIMEOUT_S)

    async def _swept(self) -> None:
        """Run the sweeps that follow deletions, now instead of after a minute: no stale worker uploads any more."""
        deleted = {job_id for request in self.client.requests for job_id in request.deleted}
        name = self.cluster.keys.retention
        with self.cluster.redis.client as client:
            if rows := [row for row in client.zrange(name, 0, -1) if row.split("|")[2] in deleted]:
                client.zadd(name, dict.fromkeys(rows, 1), xx=True)
        async with retention.opened(self.cluster.settings("chores")) as sweep:
            while await sweep.run():
                pass
