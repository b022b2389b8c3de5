"""A reader of the queue's event stream and progress channel that outlasts every outage of Redis."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import defaultdict

import redis
from redis.asyncio import Redis

from chaos.sleeping_engine import EPOCH_STEPS
from shared.job import State
from shared.queue.redis_keys import RedisKeys
from shared.runtime.asyncio_tools import cancel_and_wait

BLOCK_MS = 500
_ERRORS = (redis.RedisError, OSError, TimeoutError)


class Monitor:
    """What happened, in order: `async with Monitor(port, keys) as monitor`."""

    def __init__(self, port: int, keys: RedisKeys) -> None:
        self.port = port
        self._keys = keys
        self.ends: defaultdict[str, list[str]] = defaultdict(list)
        self.claims: defaultdict[str, int] = defaultdict(int)
        self.places: dict[tuple[str, State], int] = {}
        """Which event was the first of a job with this state, among those of all jobs."""
        self._events = 0
        self.last_end_s = time.monotonic()
        self.stale_progress: list[str] = []
        self._epochs: defaultdict[str, int] = defaultdict(int)
        self._last = "0-0"
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Monitor:
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._listen())]
        return self

    async def __aexit__(self, *_: object) -> None:
        await cancel_and_wait(self._tasks)

    def switch(self, port: int) -> None:
        """Continue at another server, which has the same events."""
        self.port = port

    async def caught_up(self) -> None:
        """Return when every event written so far has been read."""
        async with self._client() as client:
            newest = await client.xrevrange(self._keys.events, count=1)
        while newest and _order(self._last) < _order(newest[0][0]):
            await asyncio.sleep(0.02)

    def _client(self) -> Redis:
        return Redis(port=self.port, decode_responses=True, socket_timeout=BLOCK_MS / 1000 + 5)

    async def _read(self) -> None:
        while True:
            with contextlib.suppress(*_ERRORS):
                async with self._client() as client:
                    while True:
                        reply = await client.xread({self._keys.events: self._last}, count=1000, block=BLOCK_MS)
                        for event_id, fields in reply[0][1] if reply else ():
                            self._last = event_id
                            self._count(fields["job"], State(fields["state"]))
            await asyncio.sleep(0.1)

    def _count(self, job_id: str, state: State) -> None:
        self._events += 1
        self.places.setdefault((job_id, state), self._events)
        if state.terminal:
            self.ends[job_id].append(state)
            self.last_end_s = time.monotonic()
        elif state is State.RUNNING:
            self.claims[job_id] += 1

    async def _listen(self) -> None:
        while True:
            with contextlib.suppress(*_ERRORS):
                async with self._client() as client, client.pubsub(ignore_subscribe_messages=True) as channel:
                    await channel.subscribe(self._keys.progress)
                    while True:
                        if message := await channel.get_message(timeout=1.0):
                            self._progress(json.loads(message["data"]))
            await asyncio.sleep(0.1)

    def _progress(self, rows: list[dict[str, int | str]]) -> None:
        """Note a report of an older claim that follows one of a newer claim."""
        for row in rows:
            job_id, epoch = str(row["job"]), int(row["total"]) // EPOCH_STEPS
            if epoch and epoch < self._epochs[job_id]:
                self.stale_progress.append(f"{job_id}: claim {epoch} after {self._epochs[job_id]}")
            self._epochs[job_id] = max(epoch, self._epochs[job_id])


def _order(event_id: str) -> tuple[int, int]:
    milliseconds, _, number = event_id.partition("-")
    return int(milliseconds), int(number)
