"""Events: every subscriber gets its job's changes, in order, whatever happens to the connection."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from harness.queue import claim, end, lose, put
from redis import Redis

from shared.errors import NotFound
from shared.job import Phase, State
from shared.job_record import Progress
from shared.queue import EventFeed, JobEvent, ProgressReport, Queue, Submission
from shared.queue import events as events_module

Make = Callable[..., Submission]
Eventually = Callable[..., Awaitable[None]]


@pytest.fixture
async def feed(queue: Queue, eventually: Eventually) -> AsyncIterator[EventFeed]:
    async with EventFeed(queue) as feed:

        async def listens() -> bool:
            return (await queue.client.redis.pubsub_numsub(queue.client.redis_keys.progress))[0][1] == 1

        await eventually(listens, "the feed would hear of progress, which is not kept")
        yield feed


def states(events: list[JobEvent]) -> list[State | None]:
    return [event.state for event in events if event.kind == "state"]


async def collect(events: AsyncIterator[JobEvent], into: list[JobEvent]) -> None:
    async with asyncio.timeout(60):
        async for event in events:
            into.append(event)


async def test_a_subscriber_sees_it_all(
    queue: Queue, feed: EventFeed, make_submission: Make, eventually: Eventually
) -> None:
    """The present state first, then each change and the progress, and the end."""
    (job_id,) = await put(queue, make_submission())
    seen: list[JobEvent] = []
    async with feed.subscribe(job_id) as events:
        reader = asyncio.create_task(collect(events, seen))
        (one,) = await claim(queue)
        await eventually(lambda: State.RUNNING in states(seen), "the job runs")
        await queue.claims.report_progress(
            ProgressReport(job_id, one.epoch, Phase.DENOISING, Progress(step=1, total=8))
        )
        await eventually(lambda: seen[-1].kind == "progress", "progress arrives")
        await queue.claims.report_progress(
            ProgressReport(job_id, one.epoch, Phase.DENOISING, Progress(step=2, total=8), store=False)
        )
        await eventually(lambda: seen[-1].progress == Progress(step=2, total=8), "more progress arrives")
        await end(queue, one)
        await reader
    assert states(seen) == [State.QUEUED, State.RUNNING, State.SUCCEEDED]
    assert {event.tenant for event in seen} == {"default"}
    assert seen[-1].kind == "state"


async def test_many_subscribers_of_one_job(queue: Queue, feed: EventFeed, make_submission: Make) -> None:
    """Each gets all events of its job, and none of others."""
    mine, other = await put(queue, make_submission(), make_submission())
    logs: list[list[JobEvent]] = [[], [], []]
    async with feed.subscribe(mine) as a, feed.subscribe(mine) as b, feed.subscribe(other) as c:
        readers = [asyncio.create_task(collect(events, log)) for events, log in zip((a, b, c), logs, strict=True)]
        for one in await claim(queue):
            await end(queue, one)
        await asyncio.gather(*readers)
    for log, job_id in zip(logs, (mine, mine, other), strict=True):
        assert states(log)[-1] is State.SUCCEEDED
        assert {event.job_id for event in log} == {job_id}
        assert len({event.id for event in log}) == len(log)


async def test_one_message_has_the_progress_of_many_jobs(
    queue: Queue, feed: EventFeed, make_submission: Make, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Progress of a whole batch wakes a process once; it is written only where the report says so."""
    messages: list[str] = []
    advance = feed._advance

    def count_and_advance(message: str) -> None:
        messages.append(message)
        advance(message)

    monkeypatch.setattr(feed, "_advance", count_and_advance)
    mine, other = await put(queue, make_submission(), make_submission())
    first, second = await claim(queue)
    seen: dict[str, list[JobEvent]] = {mine: [], other: []}
    async with feed.subscribe(mine) as a, feed.subscribe(other) as b:
        readers = [asyncio.create_task(collect(events, seen[job])) for events, job in ((a, mine), (b, other))]
        written = await queue.claims.report_progress(
            ProgressReport(mine, first.epoch, Phase.DENOISING, Progress(step=1, total=8)),
            ProgressReport(other, second.epoch, Phase.DENOISING, Progress(step=2, total=8), store=False),
        )
        await eventually(lambda: all(log and log[-1].kind == "progress" for log in seen.values()), "both get progress")
        for one in (first, second):
            await end(queue, one)
        await asyncio.gather(*readers)
    assert (len(messages), written) == (1, 2)
    steps = {
        job: [event.progress.step for event in log if event.kind == "progress" and event.progress]
        for job, log in seen.items()
    }
    assert steps == {mine: [1], other: [2]}


async def test_progress_of_an_outdated_claim_is_not_published(
    queue: Queue, feed: EventFeed, make_submission: Make, eventually: Eventually
) -> None:
    """A worker that was frozen reports in one message on a job that it lost and on one that it has."""
    lost, kept = await put(queue, make_submission(), make_submission())
    old, mine = await claim(queue, worker="frozen")
    await lose(queue, lost)
    await queue.maintenance.reclaim()
    (new,) = await claim(queue, worker="other")
    seen: dict[str, list[JobEvent]] = {lost: [], kept: []}
    async with feed.subscribe(lost) as a, feed.subscribe(kept) as b:
        readers = [asyncio.create_task(collect(events, seen[job])) for events, job in ((a, lost), (b, kept))]
        await eventually(lambda: all(seen.values()), "both have their present state")
        for store in (True, False):
            assert (
                await queue.claims.report_progress(
                    ProgressReport(lost, old.epoch, Phase.DENOISING, Progress(step=7, total=8), store),
                    ProgressReport(kept, mine.epoch, Phase.DENOISING, Progress(step=3, total=8), store),
                )
                == 1
            )
        await queue.claims.report_progress(ProgressReport(lost, new.epoch, Phase.DENOISING, Progress(step=1, total=8)))
        await eventually(lambda: all(log[-1].kind == "progress" for log in seen.values()), "both get progress")
        await end(queue, new, worker="other")
        await end(queue, mine, worker="frozen")
        await asyncio.gather(*readers)
    steps = {job: {e.progress.step for e in log if e.kind == "progress" and e.progress} for job, log in seen.items()}
    assert steps == {lost: {1}, kept: {3}}


async def test_preview_of_an_outdated_claim_is_not_stored(queue: Queue, make_submission: Make) -> None:
    """The subscribers of the job see the previews of one run only."""
    (job_id,) = await put(queue, make_submission())
    (old,) = await claim(queue, worker="frozen")
    await lose(queue, job_id)
    await queue.maintenance.reclaim()
    assert not await queue.previews.put(job_id, old.epoch, 0, 0, b"old")
    (new,) = await claim(queue, worker="other")
    assert not await queue.previews.put(job_id, old.epoch, 0, 0, b"old")
    assert await queue.previews.put(job_id, new.epoch, 0, 0, b"new")
    (preview,) = await queue.previews.get(job_id)
    assert base64.b64decode(preview.b64) == b"new"


async def test_a_feed_without_subscribers_reads_nothing(
    queue: Queue, feed: EventFeed, make_submission: Make, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An API process would otherwise be woken by every event of every job."""
    monkeypatch.setattr(events_module, "IDLE_S", 0.01)

    async def reads() -> int:
        commands = await queue.client.redis.info("commandstats")
        return int(commands.get("cmdstat_xread", {"calls": 0})["calls"])

    before = await reads()
    (job_id,) = await put(queue, make_submission())
    for _ in range(100):  # of round trips, in which the feed could read the event
        assert await reads() == before
    seen: list[JobEvent] = []
    async with feed.subscribe(job_id) as events:
        reader = asyncio.create_task(collect(events, seen))
        (one,) = await claim(queue)
        await end(queue, one)
        await reader
    assert states(seen) == [State.QUEUED, State.RUNNING, State.SUCCEEDED]
    assert await reads() > before

    async def idle() -> bool:
        return not any("b" in client["flags"] for client in await queue.client.redis.client_list())

    await eventually(idle, "the feed has no subscriber any more")


async def test_a_waiter_gets_only_the_terminal_state(
    queue: Queue, feed: EventFeed, make_submission: Make, eventually: Eventually
) -> None:
    """A request that waits is not woken by each step of its job."""
    (job_id,) = await put(queue, make_submission())
    seen: list[JobEvent] = []
    all_seen: list[JobEvent] = []
    async with feed.subscribe(job_id, end_only=True) as events, feed.subscribe(job_id) as all_events:
        readers = [asyncio.create_task(collect(*pair)) for pair in ((events, seen), (all_events, all_seen))]
        (one,) = await claim(queue)
        await queue.claims.report_progress(
            ProgressReport(job_id, one.epoch, Phase.DENOISING, Progress(step=1, total=8))
        )
        await eventually(lambda: bool(all_seen) and all_seen[-1].kind == "progress", "the other gets progress")
        await end(queue, one)
        await asyncio.gather(*readers)
    assert [event.state for event in seen] == [State.SUCCEEDED]
    seen.clear()
    async with feed.subscribe(job_id, end_only=True) as events:
        await collect(events, seen)
    assert [event.state for event in seen] == [State.SUCCEEDED], "one that has ended says so at once"


async def test_an_ended_job_gives_its_state_and_ends(queue: Queue, feed: EventFeed, make_submission: Make) -> None:
    """Who comes late gets the present state."""
    (job_id,) = await put(queue, make_submission())
    await end(queue, (await claim(queue))[0])
    seen: list[JobEvent] = []
    async with feed.subscribe(job_id) as events:
        await collect(events, seen)
    assert states(seen) == [State.SUCCEEDED]


async def test_what_was_missed_is_replayed(queue: Queue, feed: EventFeed, make_submission: Make) -> None:
    """After the last event seen, each change since then, none twice."""
    (job_id,) = await put(queue, make_submission())
    record = await queue.jobs.get(job_id)
    assert record is not None
    (one,) = await claim(queue)
    await end(queue, one)
    seen: list[JobEvent] = []
    async with feed.subscribe(job_id, after=record.event_id) as events:
        await collect(events, seen)
    assert states(seen) == [State.RUNNING, State.SUCCEEDED]
    again: list[JobEvent] = []
    async with feed.subscribe(job_id, after=seen[-1].id) as events:
        await collect(events, again)
    assert again == []


@pytest.mark.parametrize(
    "after", ["1-0", "garbage", "", "99-99-99", "99999999999999-0", "٣-0", "{}-99999999999999999999"]
)
async def test_what_cannot_be_replayed_gives_the_present_state(
    queue: Queue, feed: EventFeed, make_submission: Make, after: str
) -> None:
    """An id too old, or later than all (of another Redis, perhaps), or none of ours. `{}` stands for a time of ours."""
    (job_id,) = await put(queue, make_submission())
    record = await queue.jobs.get(job_id)
    assert record is not None
    await end(queue, (await claim(queue))[0])
    seen: list[JobEvent] = []
    async with feed.subscribe(job_id, after=after.format(record.event_id.partition("-")[0])) as events:
        await collect(events, seen)
    assert states(seen) == [State.SUCCEEDED]


async def test_one_who_has_seen_all_waits_for_the_next(queue: Queue, feed: EventFeed, make_submission: Make) -> None:
    """No event is repeated, and the next change follows."""
    (job_id,) = await put(queue, make_submission())
    record = await queue.jobs.get(job_id)
    assert record is not None
    seen: list[JobEvent] = []
    async with feed.subscribe(job_id, after=record.event_id) as events:
        reader = asyncio.create_task(collect(events, seen))
        await queue.jobs.cancel(job_id)
        await reader
    assert states(seen) == [State.CANCELED]


async def test_an_id_from_the_future_hides_nothing(queue: Queue, feed: EventFeed, make_submission: Make) -> None:
    """As after Redis lost its events: the client gets the present state and all later changes."""
    (job_id,) = await put(queue, make_submission())
    seen: list[JobEvent] = []
    async with feed.subscribe(job_id, after="99999999999999-0") as events:
        reader = asyncio.create_task(collect(events, seen))
        await queue.jobs.cancel(job_id)
        await reader
    assert states(seen)[-1] is State.CANCELED


async def test_a_wait_that_times_out_loses_no_event(queue: Queue, feed: EventFeed, make_submission: Make) -> None:
    (job_id,) = await put(queue, make_submission())
    seen: list[JobEvent] = []
    async with feed.subscribe(job_id) as events:
        seen.append(await anext(events))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await anext(events)
        await queue.jobs.cancel(job_id)
        await collect(events, seen)
    assert states(seen) == [State.QUEUED, State.CANCELED]


async def test_an_unknown_job_is_not_found(feed: EventFeed) -> None:
    """And leaves no subscription."""
    with pytest.raises(NotFound):
        async with feed.subscribe("job_unknown"):
            pass
    assert not feed._subscriptions


async def test_a_slow_subscriber_loses_progress_and_no_change(
    queue: Queue, feed: EventFeed, make_submission: Make, eventually: Eventually
) -> None:
    """What it has not read is bounded: the latest progress, and the changes."""
    job_id, probe = await put(queue, make_submission(), make_submission())
    first, second = await claim(queue)
    seen: list[JobEvent] = []
    probed: list[JobEvent] = []
    async with feed.subscribe(job_id) as events, feed.subscribe(probe) as probing:
        reader = asyncio.create_task(collect(probing, probed))
        await eventually(lambda: len(probed) == 1, "the probe is subscribed")
        for step in range(500):
            await queue.claims.report_progress(
                ProgressReport(job_id, first.epoch, Phase.DENOISING, Progress(step=step, total=500), store=False)
            )
        await queue.claims.report_progress(
            ProgressReport(probe, second.epoch, Phase.DENOISING, Progress(step=1, total=1), store=False)
        )
        await eventually(lambda: len(probed) == 2, "all progress has come")
        iterator = aiter(events)
        seen += [await anext(iterator), await anext(iterator)]
        assert seen[1].progress == Progress(step=499, total=500)
        await end(queue, first)
        await end(queue, second)
        await reader
        await collect(iterator, seen)
    assert states(seen) == [State.RUNNING, State.SUCCEEDED]


async def test_closing_the_feed_ends_its_subscribers(queue: Queue, make_submission: Make) -> None:
    """A stopping API lets its clients go."""
    (job_id,) = await put(queue, make_submission())
    seen: list[JobEvent] = []
    feed = EventFeed(queue)
    await feed.start()
    async with feed.subscribe(job_id) as events:
        reader = asyncio.create_task(collect(events, seen))
        await feed.close()
        await reader
    assert states(seen) == [State.QUEUED]


async def test_garbage_in_the_stream_does_not_stop_the_feed(
    queue: Queue, feed: EventFeed, make_submission: Make
) -> None:
    """An event of a newer version is passed by."""
    (job_id,) = await put(queue, make_submission())
    seen: list[JobEvent] = []
    async with feed.subscribe(job_id) as events:
        reader = asyncio.create_task(collect(events, seen))
        await queue.client.redis.xadd(queue.client.redis_keys.events, {"new": "kind"})
        await queue.client.redis.xadd(
            queue.client.redis_keys.events, {"job": job_id, "tenant": "default", "state": "dreaming"}
        )
        await queue.client.redis.publish(queue.client.redis_keys.progress, "{not json")
        await queue.jobs.cancel(job_id)
        await reader
    assert states(seen) == [State.QUEUED, State.CANCELED]


async def test_the_feed_on_fakeredis(fake_queue: Queue, make_submission: Make) -> None:
    """The API's fast tests get real events."""
    (job_id,) = await put(fake_queue, make_submission())
    seen: list[JobEvent] = []
    async with EventFeed(fake_queue) as feed, feed.subscribe(job_id) as events:
        reader = asyncio.create_task(collect(events, seen))
        (one,) = await claim(fake_queue)
        await end(fake_queue, one)
        await reader
    assert states(seen)[-1] is State.SUCCEEDED


async def test_a_feed_that_fell_behind_the_trimmed_stream_resynchronizes(
    queue: Queue, make_submission: Make, eventually: Eventually
) -> None:
    """Subscribers get the states whose events were trimmed before the feed read them, and later ones."""
    ended, running = await put(queue, make_submission(), make_submission())
    keys, url = queue.client.redis_keys, queue.client.settings.redis_url
    seen: dict[str, list[State | None]] = {ended: [], running: []}

    async def read(job_id: str, feed: EventFeed) -> None:
        async with feed.subscribe(job_id) as events:
            async for event in events:
                seen[job_id].append(event.state)

    async with EventFeed(queue) as feed:
        reading = [asyncio.create_task(read(job_id, feed)) for job_id in (ended, running)]
        await eventually(lambda: all(seen.values()), "both have their present state")
        with Redis.from_url(url, decode_responses=True) as blocking, blocking.pipeline(transaction=True) as pipe:
            event = {"job": ended, "tenant": "default", "state": "canceled"}
            pipe.hset(keys.job(ended), mapping={"state": "canceled", "finished": 1, "event": "99999999999990-1"})
            pipe.xadd(keys.events, event, id="99999999999990-1")
            for _ in range(600):
                pipe.xadd(keys.events, {"job": "job_other", "tenant": "default", "state": "queued"})
            pipe.xtrim(keys.events, 550, approximate=False)
            pipe.execute()  # the feed reads before or after all of it
        await asyncio.wait_for(reading[0], 30)
        assert seen[ended] == [State.QUEUED, State.CANCELED]
        await queue.jobs.cancel(running)
        await asyncio.wait_for(reading[1], 30)
    await queue.client.redis.hset(keys.job(ended), "state", "queued")
    await queue.jobs.cancel(ended)


async def test_events_after_a_trimmed_one_are_not_replayed_with_a_gap(queue: Queue, make_submission: Make) -> None:
    """A client that reconnects after an event that was trimmed gets the present state."""
    (job_id,) = await put(queue, make_submission())
    record = await queue.jobs.get(job_id)
    assert record is not None
    (one,) = await claim(queue)
    await queue.claims.release("w1", {job_id: one.epoch})
    await claim(queue)
    await queue.client.redis.xtrim(queue.client.redis_keys.events, 2, approximate=False)
    async with EventFeed(queue) as feed, feed.subscribe(job_id, record.event_id) as events:
        first = await anext(aiter(events))
        assert (first.state, first.id > record.event_id) == (State.RUNNING, True)
