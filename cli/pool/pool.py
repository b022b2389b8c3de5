"""The loop of a pool: look at what is wanted, start and drain, tell."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cli.pool.decisions import Bounds, PoolWorker, Want, aim, moves, remembered
from cli.pool.processes import PoolProcesses
from cli.up.supervisor import Tell
from fusequeue import AsyncClient, Busy, ClientError, Scale, Unreachable


@dataclass(frozen=True)
class PoolStatus:
    """How a pool stands: pictures that wait, jobs that run, and its workers here by what they do.

    `wanted` are the workers aimed at here; `asked` is what the service wants, of all workers there are.
    """

    waiting: int
    running: int
    asked: int
    wanted: int
    ready: int
    starting: int
    busy: int
    draining: int
    failing: int
    reasons: tuple[str, ...]


class Pool:
    """Keeps as many workers here as the service wants, within bounds, until it is stopped."""

    def __init__(
        self, client: AsyncClient, name: str, crew: PoolProcesses, bounds: Bounds, look_every_s: float, tell: Tell
    ) -> None:
        self._client = client
        self._name = name
        self._crew = crew
        self._bounds = bounds
        self._look_every_s = look_every_s
        self._tell = tell
        self._host = socket.gethostname()
        self._wants: tuple[Want, ...] = ()
        self._stopping = asyncio.Event()
        self._seen = False
        self._blind = False

    def stop(self) -> None:
        """Begin to drain; asked again, kill."""
        if self._stopping.is_set():
            self._crew.kill()
        self._stopping.set()

    async def run(self, told: Callable[[PoolStatus], None]) -> None:
        """Work until stopped, telling how it stands after each look; drains all before it returns or raises.

        Raises the error of a service that refuses to tell what is wanted, unless it has told before.
        """
        try:
            while not self._stopping.is_set():
                told(await self._turn())
                await self._pause()
            self._tell("draining all workers; once more kills them")
        finally:
            await self._crew.finish()
        told(self._standing(None, {}, 0))

    async def _turn(self) -> PoolStatus:
        scale, workers = await self._look()
        here = {one["pid"]: one["running"] for one in workers if one["host"] == self._host}
        if scale is not None:
            self._wants = remembered(self._wants, Want(time.monotonic(), scale.wanted), self._bounds.cool_down_s)
        others = sum(
            one["state"] != "draining" and not (one["host"] == self._host and self._crew.is_ours(one["pid"]))
            for one in workers
        )
        members = self._crew.members(here)
        # Without a word from the service what there is stays.
        blind = sum(one.state in ("starting", "ready") for one in members)
        wanted = aim(self._wants, others, self._bounds) if scale is not None else max(self._bounds.least, blind)
        move = moves(members, wanted, self._crew.slots)
        for slot in move.start:
            self._crew.start(slot)
        for slot in move.drain:
            self._crew.drain(slot)
        return self._standing(scale, here, wanted)

    def _standing(self, scale: Scale | None, running: Mapping[int, int], wanted: int) -> PoolStatus:
        members = self._crew.members(running)
        return PoolStatus(
            waiting=0 if scale is None else scale.waiting,
            running=0 if scale is None else scale.running,
            asked=0 if scale is None else scale.wanted,
            wanted=wanted,
            ready=_count(members, "ready"),
            starting=_count(members, "starting"),
            busy=sum(bool(one.running) for one in members),
            draining=_count(members, "draining"),
            failing=_count(members, "failing"),
            reasons=() if scale is None else scale.reasons,
        )

    async def _look(self) -> tuple[Scale | None, list[dict[str, Any]]]:
        try:
            scale, workers = await asyncio.gather(self._client.scale(self._name), self._client.workers())
        except ClientError as error:
            if not self._seen and not isinstance(error, Unreachable | Busy):
                raise
            if not self._blind:
                self._tell(f"{error}; what runs goes on, and it is asked again")
            self._blind = True
            return None, []
        if self._blind:
            self._tell("the service answers again")
        self._seen, self._blind = True, False
        return scale, workers

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(self._look_every_s):
                await self._stopping.wait()
        except TimeoutError:
            pass


def _count(members: Sequence[PoolWorker], state: str) -> int:
    return sum(member.state == state for member in members)
