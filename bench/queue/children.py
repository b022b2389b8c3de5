"""`python -m bench.queue.children`: what jobs that wait for others cost Redis while ever more of them wait.

Each parent has 100 children; the parents are jobs for later, so that no worker claims them. At each size, rounds on the
growing queue take turns with rounds on one where none waits: what else runs on the machine hardly changes the ratio. A
round submits a job and 100 children of it, reads the estimate of one, settles the job, which queues them, and claims
and settles those. Then it reads the estimate of a job with `CHAIN` unfinished jobs before it, as many as one script
reads, each of which waits for up to 16. In the end all parents of the last size are canceled, and every child is told
and queued. `--json FILE` saves the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.common import record
from bench.queue.filling import MODEL, JobSource, Level, submit
from bench.queue.private_redis import MeasuredClient, ScriptCost, private_redis
from bench.queue.rounds import outcome
from shared.config.settings import Settings
from shared.job_fields import OnParentFailure
from shared.queue import Claim, Queue, Submission
from shared.queue.connections.pools import connect_blocking, connect_commands
from shared.runtime.clock import now_ms

SIZES = (0, 10_000, 100_000)
CHILDREN = 100
CHAIN = 64
SLOTS = 8
TENANTS = 20
WORKER, MODELS = "worker", (MODEL,)
LATER_MS = 86_400_000


@dataclass(frozen=True)
class Spread:
    """Redis microseconds and commands of one kind of script."""

    runs: int
    p50_us: int
    p99_us: int
    max_us: int
    max_commands: int

    @classmethod
    def of(cls, costs: list[ScriptCost]) -> Spread:
        micros = sorted(one.microseconds for one in costs)
        most = max(one.commands for one in costs)
        return cls(len(micros), micros[len(micros) // 2], micros[-1 - len(micros) // 100], micros[-1], most)


class ParentsQueue:
    """A queue with waiting children, and the costs of its scripts by operation."""

    def __init__(self, url: str, most: int) -> None:
        limit = 4 * (most + 1000)
        settings = Settings(
            redis_url=url, namespace="bench", max_queued_jobs=limit, max_queued_jobs_per_tenant=limit, lease_ms=600_000
        )
        redis, blocking = connect_commands(url), connect_blocking(url)
        self._client = MeasuredClient(redis, namespace=settings.namespace, settings=settings, blocking=blocking)
        self._queue, self._source = Queue(self._client), JobSource(seed=1)
        self._parents: list[str] = []
        self.costs: defaultdict[str, list[ScriptCost]] = defaultdict(list)
        self.bytes_per_child = 0

    def _job(self, **changes: object) -> Submission:
        one = self._source.job(Level(10_000, 100, TENANTS))
        return replace(one, job=one.job.model_copy(update={"tenant": "tenant-0", **changes}))

    async def grow(self, waiting: int) -> None:
        """Let children wait until there are `waiting`; notes the bytes of each of those added."""
        before_bytes, before, at_ms = await self._client.used_bytes(), len(self._parents), now_ms() + LATER_MS
        added = waiting // CHILDREN - before
        for _ in range(added):
            parent = self._job(not_before_ms=at_ms)
            await submit(self._queue, [parent])
            await submit(self._queue, self._children(parent))
            self._parents.append(parent.job.id)
        if added:
            more = await self._client.used_bytes() - before_bytes
            self.bytes_per_child = round(more / (added * (CHILDREN + 1)))

    def _children(self, parent: Submission) -> list[Submission]:
        changes = {"after": (parent.job.id,), "on_parent_failure": OnParentFailure.RUN}
        return [self._job(**changes) for _ in range(CHILDREN)]

    async def _cost(self, name: str, call: Callable[[], Awaitable[Any]]) -> Any:
        """Run an operation and keep the cost of its scripts together, but for those that tell children."""
        result, costs = await self._client.measured(call)
        told = [one for one in costs if one.name == "queue_due"]
        own = [one for one in costs if one.name != "queue_due"]
        spent = ScriptCost(name, sum(one.microseconds for one in own), sum(one.commands for one in own))
        self.costs[name] += [spent] if own else []
        self.costs["tell and queue, of up to 100"] += told
        return result

    async def round(self) -> None:
        parent = self._job()
        await self._cost("submit a job", lambda: submit(self._queue, [parent]))
        first, *others = self._children(parent)
        await self._cost("submit a child", lambda: submit(self._queue, [first]))
        await self._cost("submit 99 children", lambda: submit(self._queue, others))
        await self._cost("read the estimate of a child", lambda: self._queue.jobs.position(others[-1].job.id))
        (claim,) = await self._queue.claims.claim(WORKER, MODELS, SLOTS)
        await self._settle(claim, "settle a parent of 100")
        await self._cost("", self._queue.maintenance.queue_due)
        while claims := await self._claim():
            for one in claims:
                await self._settle(one, "settle a job")

    async def _claim(self) -> list[Claim]:
        claims: list[Claim] = await self._cost("claim", partial(self._queue.claims.claim, WORKER, MODELS, SLOTS))
        if not claims:
            self.costs["claim"].pop()
        return claims

    async def _settle(self, claim: Claim, name: str) -> None:
        call = partial(self._queue.claims.settle, WORKER, claim.job.id, claim.epoch, outcome(claim))
        await self._cost(name, call)

    async def read_chain(self, rounds: int) -> dict[str, int]:
        """Let `CHAIN` jobs wait for up to 16 before each, and return what it costs to read the estimate of the last."""
        ids = [self._parents[0]]
        while len(ids) <= CHAIN:
            one = self._job(after=tuple(ids[-16:]))
            await submit(self._queue, [one])
            ids.append(one.job.id)
        self.costs.clear()
        for _ in range(rounds):
            await self._cost("read", lambda: self._queue.jobs.position(ids[-1]))
        await self._queue.changes.cancel(ids[1:])
        await self._queue.maintenance.queue_due()  # tells the chain: else `cancel_parents` would count it
        return vars(Spread.of(self.costs["read"]))

    async def cancel_parents(self) -> dict[str, Any]:
        """Cancel all parents, and tell and queue all children; return what that costs."""
        self.costs.clear()
        await self._cost("cancel", lambda: self._queue.changes.cancel(self._parents))
        told = await self._cost("", self._queue.maintenance.queue_due)
        costs = self.costs["tell and queue, of up to 100"]
        return {
            "parents": len(self._parents),
            "told_and_queued": told,
            "cancel_us": self.costs["cancel"][0].microseconds,
            "scripts": vars(Spread.of(costs)),
            "seconds": round(sum(one.microseconds for one in costs) / 1e6, 2),
        }

    async def server(self) -> str:
        return await self._client.server()

    def figures(self) -> dict[str, dict[str, int]]:
        return {name: vars(Spread.of(costs)) for name, costs in self.costs.items() if costs}

    async def close(self) -> None:
        await self._queue.close()


async def measure(urls: list[str], sizes: tuple[int, ...], rounds: int) -> dict[str, Any]:
    reference, growing = (ParentsQueue(url, sizes[-1]) for url in urls)
    steps: list[dict[str, Any]] = []
    try:
        for one in (reference, growing):
            await one.round()  # to warm up
        for waiting in sizes:
            await growing.grow(waiting)
            for one in (reference, growing):
                one.costs.clear()
            for _ in range(rounds):
                await reference.round()
                await growing.round()
            bytes_each = growing.bytes_per_child
            steps.append({"waiting": waiting, "bytes_per_child": bytes_each, "operations": growing.figures()})
            steps[-1]["none_waiting"] = reference.figures()
            print("\n".join(lines(steps[-1])), flush=True)
        figures = {"server": await growing.server(), "steps": steps, "chain": await growing.read_chain(rounds)}
        return {**figures, "all_told": await growing.cancel_parents()}
    finally:
        await reference.close()
        await growing.close()


def lines(step: Mapping[str, Any]) -> list[str]:
    """Return the median of each operation and its ratio to that of the queue where none waits."""
    shown = [f"{step['waiting']:,} children wait, {step['bytes_per_child']:,} bytes each"]
    for name, spread in step["operations"].items():
        ratio = spread["p50_us"] / max(1, step["none_waiting"][name]["p50_us"])
        shown.append(f"  {name:<30} {spread['p50_us']:>7,} us x {ratio:.2f} ({spread['max_commands']:,} commands)")
    return shown


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Measure, print, save and return the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--waiting", type=int, nargs="+", default=SIZES, help="sizes, multiples of 100")
    parser.add_argument("--rounds", type=int, default=20, help="of all operations, at each size")
    parser.add_argument("--json", type=Path, help="save the figures and their environment")
    options = parser.parse_args(argv)
    with ExitStack() as stack:
        folders = [stack.enter_context(tempfile.TemporaryDirectory(prefix="fusequeue-queue-")) for _ in range(2)]
        urls = [stack.enter_context(private_redis(Path(folder))) for folder in folders]
        figures = asyncio.run(measure(urls, tuple(options.waiting), options.rounds))
    print(figures["chain"], figures["all_told"])
    if options.json is not None:
        record.write(options.json, figures, rounds=options.rounds)
    return figures


if __name__ == "__main__":
    main()
