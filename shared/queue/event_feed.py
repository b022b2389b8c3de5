"""Events of the queue, read once a process and handed to any number of subscribers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

import structlog

from shared.errors import NotFound, RedisUnavailable
from shared.job import JobRecord, Phase, Progress, State
from shared.queue.client import MAX_BLOCK_MS, translated
from shared.queue.records import JobEvent, ProgressReport
from shared.runtime import metrics
from shared.runtime.cancellation import cancel_and_wait
from shared.runtime.clock import now_ms

if TYPE_CHECKING:
    from shared.queue.queue import Queue

log = structlog.get_logger()

STATES_KEPT = 64
"""Changes of state kept for a subscriber that does not read; a job has a handful, so only a broken one passes it."""

REPLAY_READ = 1000
"""Entries of the stream read to replay one job's past; where they do not reach, its present state is given."""

RESYNC_AT_ONCE = 500
_LARGEST_NUMBER = 2**64 - 1  # of a stream id's second part; Redis refuses to read after a larger one
MAX_BACKOFF_S = 5.0


def progress_message(reports: Sequence[ProgressReport]) -> str:
    """Return what those who listen are told, in one message for all jobs: each wakes every process that listens."""
    told = [
        {"job": one.job_id, "phase": one.phase.value, "step": one.progress.step, "total": one.progress.total}
        for one in reports
    ]
    return json.dumps(told, separators=(",", ":"))


def _order(event_id: str) -> tuple[int, int]:
    """Return a stream id as a value that sorts; what is not one sorts before all."""
    time, _, number = event_id.partition("-")
    if not (event_id.isascii() and time.isdecimal() and (number or "0").isdecimal()):
        return (-1, -1)
    return (int(time), int(number or 0)) if int(number or 0) <= _LARGEST_NUMBER else (-1, -1)


def _present(record: JobRecord) -> JobEvent:
    return JobEvent(
        id=record.event_id,
        job_id=record.job.id,
        tenant=record.job.tenant,
        kind="state",
        state=record.state,
        phase=record.phase,
        progress=record.progress,
    )


class _Subscription:
    """What one subscriber has not read yet: changes of state in order, and the latest progress only.

    `end_only`: nothing but the terminal state, so that nothing else wakes who waits for it.
    """

    def __init__(self, job_id: str, *, end_only: bool) -> None:
        self.job_id = job_id
        self._end_only = end_only
        self._tenant = ""
        self._states: deque[JobEvent] = deque(maxlen=STATES_KEPT)
        self._progress: JobEvent | None = None
        self._newest = "0-0"
        self._gone = False
        self._wake = asyncio.Event()
        self._early: deque[JobEvent] | None = deque(maxlen=STATES_KEPT)

    def begin(self, past: Sequence[JobEvent]) -> None:
        """Take up what has been until now, then what came in meanwhile."""
        early, self._early = self._early or (), None
        for event in (*past, *early):
            self.change(event)

    def change(self, event: JobEvent) -> None:
        if self._early is not None:
            self._early.append(event)
            return
        if _order(event.id) <= _order(self._newest):
            return
        self._newest, self._tenant = event.id, event.tenant
        if self._end_only and not (event.state is not None and event.state.terminal):
            return
        self._states.append(event)
        self._progress = None
        self._wake.set()

    def advance(self, phase: Phase, progress: Progress) -> None:
        if self._end_only:
            return
        self._progress = JobEvent(
            id=self._newest, job_id=self.job_id, tenant=self._tenant, kind="progress", phase=phase, progress=progress
        )
        self._wake.set()

    def end(self) -> None:
        self._gone = True
        self._wake.set()

    def skip_to(self, event_id: str) -> None:
        self._newest = event_id

    async def events(self) -> AsyncIterator[JobEvent]:
        while True:
            if self._states:
                event = self._states.popleft()
                yield event
                if event.state is not None and event.state.terminal:
                    return
            elif self._gone:
                return
            elif self._progress is not None:
                latest, self._progress = self._progress, None
                yield latest
            else:
                self._wake.clear()
                await self._wake.wait()


class EventFeed:
    """One a process: `async with EventFeed(queue) as feed`. It reads the event stream and the progress channel once."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._subscriptions: defaultdict[str, set[_Subscription]] = defaultdict(set)
        self._last: str | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to read. A Redis that is away does not matter: what was missed is made up for when it is back."""
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._read_forever()), asyncio.create_task(self._listen_forever())]

    async def close(self) -> None:
        await cancel_and_wait(self._tasks)
        self._tasks = []
        for subscriptions in self._subscriptions.values():
            for subscription in subscriptions:
                subscription.end()

    async def __aenter__(self) -> EventFeed:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @contextlib.asynccontextmanager
    async def subscribe(
        self, job_id: str, after: str | None = None, *, end_only: bool = False
    ) -> AsyncIterator[AsyncIterator[JobEvent]]:
        """Give the job's changes and progress, and end with its terminal state, or when the feed is closed.

        Without `after`, the present state comes first. With it (the id of the last event seen), the changes since then
        do, or the present state where they cannot be told any more. `end_only`: the terminal state and nothing before
        it. Raises `NotFound`.
        """
        subscription = _Subscription(job_id, end_only=end_only)
        self._subscriptions[job_id].add(subscription)  # registered first: no change falls between
        try:
            await self._catch_up(subscription, after)
            yield subscription.events()
        finally:
            self._subscriptions[job_id].discard(subscription)
            if not self._subscriptions[job_id]:
                del self._subscriptions[job_id]

    async def _catch_up(self, subscription: _Subscription, after: str | None) -> None:
        record = await self._queue.jobs.get(subscription.job_id)
        if record is None:
            raise NotFound(f"no job {subscription.job_id}")
        missed = None if after is None else await self._missed(record, after)
        if missed is None:
            subscription.begin([_present(record)])
            return
        subscription.skip_to(after or "")
        subscription.begin(missed)
        if record.state.terminal:  # one that has seen all is to end as well
            subscription.end()

    async def _missed(self, record: JobRecord, after: str) -> list[JobEvent] | None:
        """Return the job's changes later than `after`, or None where the stream cannot tell all of them."""
        if not (0, 0) <= _order(after) <= _order(record.event_id):  # later than the last: no event of this Redis
            return None
        if _order(after) == _order(record.event_id):
            return []
        keys = self._queue.client.redis_keys
        with translated():
            oldest = await self._queue.client.redis.xrange(keys.events, count=1)
            if not oldest or _order(after) < _order(oldest[0][0]):
                return None
            rows = await self._queue.client.redis.xrange(keys.events, f"({after}", record.event_id, count=REPLAY_READ)
        if not rows or rows[-1][0] != record.event_id:
            return None
        return [_event(event_id, fields) for event_id, fields in rows if fields.get("job") == record.job.id]

    async def _read_forever(self) -> None:
        await self._forever("events", self._read)

    async def _listen_forever(self) -> None:
        await self._forever("progress", self._listen)

    async def _forever(self, what: str, reading: Any) -> None:
        failures = 0
        while True:
            began = asyncio.get_running_loop().time()
            try:
                await reading()
            except RedisUnavailable as error:
                log.warning("feed_interrupted", reading=what, reason=error.message)
            except Exception:
                log.exception("feed_failed", reading=what)
            lasted = asyncio.get_running_loop().time() - began
            failures = 0 if lasted > MAX_BACKOFF_S else min(failures + 1, 8)
            await asyncio.sleep(random.uniform(0.5, 1) * min(MAX_BACKOFF_S, 0.05 * 2**failures))

    async def _read(self) -> None:
        queue = self._queue
        if self._last is None:
            with translated():
                tail = await queue.client.redis.xrevrange(queue.client.redis_keys.events, count=1)
            self._last = tail[0][0] if tail else "0-0"
        await self._resync()
        while True:
            with translated():
                reply = await queue.client.blocking.xread(
                    {queue.client.redis_keys.events: self._last}, count=500, block=MAX_BLOCK_MS
                )
            for _, rows in reply or ():
                for event_id, fields in rows:
                    self._last = event_id
                    # A stream's id begins with the time of Redis; that of a second machine may be a little behind.
                    metrics.event_lag_seconds.observe(max(0.0, (now_ms() - _order(event_id)[0]) / 1000))
                    self._hand_out(_event(event_id, fields))

    def _hand_out(self, event: JobEvent) -> None:
        for subscription in self._subscriptions.get(event.job_id, ()):
            subscription.change(event)

    async def _resync(self) -> None:
        """Give every subscriber its job's present state: changes may have gone by unread."""
        job_ids = list(self._subscriptions)
        for first in range(0, len(job_ids), RESYNC_AT_ONCE):
            some = job_ids[first : first + RESYNC_AT_ONCE]
            for job_id, record in zip(some, await self._queue.jobs.get_many(some), strict=True):
                for subscription in self._subscriptions.get(job_id, ()):
                    if record is None:
                        subscription.end()
                    else:
                        subscription.change(_present(record))

    async def _listen(self) -> None:
        async with self._queue.client.blocking.pubsub(ignore_subscribe_messages=True) as channel:
            with translated():
                await channel.subscribe(self._queue.client.redis_keys.progress)
                while True:
                    message = await channel.get_message(timeout=1.0)
                    if message is not None:
                        self._advance(message["data"])

    def _advance(self, message: str) -> None:
        for told in json.loads(message):
            for subscription in self._subscriptions.get(told["job"], ()):
                subscription.advance(Phase(told["phase"]), Progress(step=told["step"], total=told["total"]))


def _event(event_id: str, fields: dict[str, str]) -> JobEvent:
    state = State(fields["state"])
    return JobEvent(id=event_id, job_id=fields["job"], tenant=fields["tenant"], kind="state", state=state)
