"""Events of jobs: one reader per process for any number of subscribers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import structlog

from shared.errors import NotFound, RedisUnavailable
from shared.job import Phase, State
from shared.job_record import JobRecord, Progress
from shared.queue.connections.errors import translated
from shared.queue.connections.pools import MAX_BLOCK_MS
from shared.queue.records import Fields, JobEvent, paired
from shared.runtime import metrics
from shared.runtime.asyncio_tools import cancel_and_wait
from shared.runtime.backoff import backoff_s
from shared.runtime.clock import now_ms

if TYPE_CHECKING:
    from shared.queue.queue import Queue

log = structlog.get_logger()

STATES_KEPT = 64
"""State changes kept for a subscriber that does not read; a job has only a few."""

REPLAY_READ = 1000
"""Stream entries read to replay one job's changes; if they are too few, the subscriber gets the present state."""

RESYNC_AT_ONCE = 500
EVENTS_READ = 500
CHECK_PRIMARY_S = 5.0
"""A process that only reads does not notice otherwise that its server has become a replica."""

_LARGEST_NUMBER = 2**64 - 1  # of a stream id's second part; Redis refuses to read after a larger one
GATHER_S = 0.005
"""Between two reads of events: a job has about four, and each read costs as much as ten events more."""

IDLE_S = 5.0
"""Time without a subscriber after which the stream is no longer read."""

BEGIN_S = 2.0
MAX_BACKOFF_S = 5.0


def _order(event_id: str) -> tuple[int, int]:
    """Return a stream id as a sortable value; an invalid id sorts before all others."""
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
    """A subscriber's unread events: state changes in order, and only the latest progress.

    `end_only` keeps only the terminal state, so that nothing else wakes the subscriber.
    """

    def __init__(self, job_id: str, *, end_only: bool) -> None:
        self.job_id = job_id
        self._end_only = end_only
        self._tenant = ""
        self._states: deque[JobEvent] = deque(maxlen=STATES_KEPT)
        self._progress: tuple[Phase, Progress] | None = None
        self._running = False
        self._newest = "0-0"
        self._gone = False
        self._ended = False
        self._wake = asyncio.Event()
        self._early: deque[JobEvent] | None = deque(maxlen=STATES_KEPT)

    def begin(self, past: Sequence[JobEvent]) -> None:
        """Add the past changes, then those received in the meantime."""
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
        self._running = event.state is State.RUNNING
        if not self._running:
            self._progress = None
        self._wake.set()

    def advance(self, phase: Phase, progress: Progress) -> None:
        if self._end_only:
            return
        self._progress = phase, progress
        if self._running:  # it can arrive before the event that the job runs, and follows that
            self._wake.set()

    def end(self) -> None:
        self._gone = True
        self._wake.set()

    def skip_to(self, event_id: str) -> None:
        self._newest = event_id

    def __aiter__(self) -> _Subscription:
        return self

    async def __anext__(self) -> JobEvent:
        """Return the next event; a canceled call loses none, so that callers can wait with a timeout."""
        while not self._ended:
            if self._states:
                event = self._states.popleft()
                self._ended = event.state is not None and event.state.terminal
                return event
            if self._gone:
                break
            if self._running and self._progress is not None:
                (phase, progress), self._progress = self._progress, None
                return self._progress_event(phase, progress)
            self._wake.clear()
            await self._wake.wait()
        raise StopAsyncIteration

    def _progress_event(self, phase: Phase, progress: Progress) -> JobEvent:
        return JobEvent(
            id=self._newest, job_id=self.job_id, tenant=self._tenant, kind="progress", phase=phase, progress=progress
        )


class EventFeed:
    """Reads the event stream and the progress channel once per process: `async with EventFeed(queue) as feed`."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._subscriptions: defaultdict[str, set[_Subscription]] = defaultdict(set)
        self._subscribed, self._reading = asyncio.Event(), asyncio.Event()
        self._last = "0-0"
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start reading. After a Redis outage subscribers get the present state of their jobs."""
        if not self._tasks:
            readers = {"events": self._read, "progress": self._listen}
            self._tasks = [asyncio.create_task(self._forever(name, read)) for name, read in readers.items()]

    async def close(self) -> None:
        await cancel_and_wait(self._tasks)
        self._tasks = []
        self.end_subscriptions()

    def end_subscriptions(self) -> None:
        """End all subscriptions after the events that they have received."""
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
        """Yield the job's state changes and progress until its terminal state, or until the feed is closed.

        The first event is the present state or, with `after` (the id of the last event seen), the changes since, as far
        as the stream still has them. `end_only` yields only the terminal state. Raises `NotFound`.
        """
        subscription = _Subscription(job_id, end_only=end_only)
        self._subscriptions[job_id].add(subscription)  # registered first, so that no change is missed
        self._subscribed.set()
        try:
            with contextlib.suppress(TimeoutError):  # without Redis
                async with asyncio.timeout(BEGIN_S):
                    await self._reading.wait()
            await self._catch_up(subscription, after)
            yield subscription
        finally:
            self._subscriptions[job_id].discard(subscription)
            if not self._subscriptions[job_id]:
                del self._subscriptions[job_id]
            if not self._subscriptions:
                self._subscribed.clear()

    async def _catch_up(self, subscription: _Subscription, after: str | None) -> None:
        record = await self._queue.jobs.get(subscription.job_id)
        if record is None:
            raise NotFound(f"no such job: {subscription.job_id}")
        missed = None if after is None else await self._missed(record, after)
        if missed is None:
            subscription.begin([_present(record)])
            return
        subscription.skip_to(after or "")
        subscription.begin(missed)
        if record.state.terminal:  # a subscriber that has seen all changes ends as well
            subscription.end()

    async def _missed(self, record: JobRecord, after: str) -> list[JobEvent] | None:
        """Return the job's changes after `after`; None if the stream does not have all of them."""
        if not (0, 0) <= _order(after) <= _order(record.event_id):  # later than the last event: not of this Redis
            return None
        if _order(after) == _order(record.event_id):
            return []
        keys = self._queue.client.redis_keys
        with translated():
            rows = await self._queue.client.redis.xrange(keys.events, f"({after}", record.event_id, count=REPLAY_READ)
        if not rows or rows[-1][0] != record.event_id or await self._is_trimmed(after):
            return None
        return [_event(event_id, fields) for event_id, fields in rows if fields.get("job") == record.job.id]

    async def _forever(self, name: str, read: Callable[[], Awaitable[None]]) -> None:
        failures = 0
        while True:
            started_s = asyncio.get_running_loop().time()
            try:
                await read()
            except RedisUnavailable as error:
                log.warning("feed_interrupted", stream=name, reason=error.message)
            except Exception:
                log.exception("feed_failed", stream=name)
            lasted_s = asyncio.get_running_loop().time() - started_s
            failures = 0 if lasted_s > MAX_BACKOFF_S else failures + 1
            await asyncio.sleep(random.uniform(0.5, 1) * backoff_s(failures, 0.1, MAX_BACKOFF_S))

    async def _read(self) -> None:
        """Read the event stream while there are subscribers, until a failover."""
        client = self._queue.client
        failovers = client.failover.count
        while client.failover.count == failovers:
            try:
                async with asyncio.timeout(CHECK_PRIMARY_S):
                    await self._subscribed.wait()
            except TimeoutError:
                await client.check_primary()
            else:
                try:
                    await self._read_while_subscribed(failovers)
                finally:
                    self._reading.clear()

    async def _read_while_subscribed(self, failovers: int) -> None:
        client, loop = self._queue.client, asyncio.get_running_loop()
        self._last = await self._newest()
        self._reading.set()
        await self._resync()
        after = ("XREAD", "COUNT", EVENTS_READ, "BLOCK", MAX_BLOCK_MS, "STREAMS", client.redis_keys.events)
        used_s = checked_s = loop.time()
        while client.failover.count == failovers and (self._subscriptions or loop.time() - used_s < IDLE_S):
            reply = await client.command(*after, self._last, blocking=True)
            rows = reply[0][1] if reply else ()
            if len(rows) == EVENTS_READ and await self._is_trimmed(self._last):
                log.warning("feed_fell_behind", last=self._last)
                self._last = await self._newest()
                await self._resync()
                continue
            self._distribute(rows)
            if self._subscriptions:
                used_s = loop.time()
            if loop.time() - checked_s > CHECK_PRIMARY_S:
                await client.check_primary()
                checked_s = loop.time()
            if len(rows) < EVENTS_READ:
                await asyncio.sleep(GATHER_S)

    def _distribute(self, rows: Sequence[tuple[str, Fields]]) -> None:
        for event_id, fields in rows:
            self._last = event_id
            # A stream id begins with Redis time, which can differ from this machine's clock.
            metrics.event_lag_seconds.observe(max(0.0, (now_ms() - _order(event_id)[0]) / 1000))
            event = _event(event_id, paired(fields))
            for subscription in self._subscriptions.get(event.job_id, ()):
                subscription.change(event)

    async def _newest(self) -> str:
        """Return the id of the newest event; 0-0 without one."""
        client = self._queue.client
        with translated():
            rows = await client.redis.xrevrange(client.redis_keys.events, count=1)
        return rows[0][0] if rows else "0-0"

    async def _is_trimmed(self, event_id: str) -> bool:
        """Return whether the stream no longer has this event, and perhaps some after it."""
        client = self._queue.client
        with translated():
            rows = await client.redis.xrange(client.redis_keys.events, count=1)
        return not rows or _order(event_id) < _order(rows[0][0])

    async def _resync(self) -> None:
        """Give every subscriber its job's present state, after a gap in reading."""
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
        """Read the progress channel until a failover."""
        failovers, keys = self._queue.client.failover.count, self._queue.client.redis_keys
        async with self._queue.client.blocking.pubsub(ignore_subscribe_messages=True) as channel:
            with translated():
                # The second one shows `join_sync_call` that this process lives.
                await channel.subscribe(keys.progress, keys.api_process(self._queue.client.process))
                while self._queue.client.failover.count == failovers:
                    message = await channel.get_message(timeout=1.0)
                    if message is not None:
                        self._advance(message["data"])

    def _advance(self, message: str) -> None:
        for row in json.loads(message):
            for subscription in self._subscriptions.get(row["job"], ()):
                subscription.advance(Phase(row["phase"]), Progress(step=row["step"], total=row["total"]))


def _event(event_id: str, fields: dict[str, str]) -> JobEvent:
    state = State(fields["state"])
    return JobEvent(id=event_id, job_id=fields["job"], tenant=fields["tenant"], kind="state", state=state)
