"""A job for each of many prompts: as many at a time as the service makes together, with results in order."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeAlias

from fusequeue.arguments import key
from fusequeue.errors import Busy, InvalidArgument, ItemFailure, JobFailed, JobsFailed, RefusedError, Unauthorized
from fusequeue.progress_bar import ProgressBar
from fusequeue.response_types import Job, Result

Prompt: TypeAlias = str | Mapping[str, Any]
"""A text, or the parameters in which a job differs: `prompt` and others."""

Submit: TypeAlias = Callable[[Mapping[str, Any]], Awaitable[Job]]
Finish: TypeAlias = Callable[[Job], Awaitable[Result]]


@dataclass(frozen=True)
class JobItem:
    """The parameters of one job, and the names of its `own`: the others are those of all jobs."""

    parameters: dict[str, Any]
    own: frozenset[str]


def job_items(prompts: Iterable[Prompt], common: Mapping[str, Any], began_at: datetime) -> Iterator[JobItem]:
    """Return the parameters of each job; an `idempotency_key` of all gets the number of each.

    Delays of `not_before` count from `began_at`: counted from its submit, a later job would wait longer than the first.
    """
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable):
        raise InvalidArgument(f"prompts: {prompts!r:.80} is no list; `run` takes one prompt")
    return (_item(index, prompt, common, began_at) for index, prompt in enumerate(prompts))


def _item(index: int, prompt: Prompt, common: Mapping[str, Any], began_at: datetime) -> JobItem:
    if not isinstance(prompt, str | Mapping):
        raise InvalidArgument(f"prompts: {prompt!r:.80} is no text, and no parameters of a job")
    own = {"prompt": prompt} if isinstance(prompt, str) else dict(prompt)
    name = common.get("idempotency_key")
    numbered = {} if name is None else {"idempotency_key": key(f"{name}-{index}", "")}
    parameters = {**common, **numbered, **own}
    delay = parameters.get("not_before")
    if (due_at := end_of_delay(delay, began_at)) is not None:
        if parameters.get("idempotency_key") is not None:
            message = f"not_before: a rerun with this idempotency_key would count the delay {delay} anew"
            raise InvalidArgument(f"{message}; use a datetime")
        parameters["not_before"] = due_at
    return JobItem(parameters, frozenset({**numbered, **own}))


def end_of_delay(value: object, began_at: datetime) -> datetime | None:
    """Return when a delay ends; None for a time, no delay, and what the service refuses."""
    try:
        delay = timedelta(seconds=value) if isinstance(value, int | float) and not isinstance(value, bool) else value
        return began_at + delay if isinstance(delay, timedelta) and delay > timedelta(0) else None
    except (OverflowError, ValueError):  # NaN, infinity, after the year 9999
        return None


class _Refused(Exception):
    """A job that was not accepted, and the reason."""

    def __init__(self, error: RefusedError | InvalidArgument | OSError) -> None:
        super().__init__(error)
        self.error = error


def concerns_one(error: Exception, own: Set[str], *, has_accepted: bool) -> bool:
    """Return whether a job was refused for a reason that the others may not have.

    That is a fault of its `own` parameters, or any after a job was accepted: what all have in common is then right.
    """
    if not isinstance(error, RefusedError):
        return has_accepted or own != {"prompt"}
    if isinstance(error, Busy | Unauthorized) or error.status >= 500:
        return False
    faults = {re.split(r"[.\[]", fault.field.lower().replace("-", "_"))[0] for fault in error.errors if fault.field}
    return has_accepted or not own.isdisjoint(faults)  # Idempotency-Key is idempotency_key


@dataclass
class Failures:
    """The jobs that failed or were not accepted, by number."""

    by_number: dict[int, ItemFailure] = field(default_factory=dict)
    refused: int = 0

    def note(self, number: int, item: JobItem, error: BaseException) -> None:
        """Note the failure of a job, after those before it; raises what is no failure of this job alone."""
        if isinstance(error, JobFailed):
            self.by_number[number] = error
        elif isinstance(error, _Refused) and concerns_one(error.error, item.own, has_accepted=number > self.refused):
            self.by_number[number] = error.error
            self.refused += 1
        else:
            raise error.error if isinstance(error, _Refused) else error


@dataclass(frozen=True)
class JobMap:
    """Runs jobs, at most `at_once` at a time; each result is saved in `folder` under the number of its prompt."""

    submit: Submit
    finish: Finish
    folder: Path | None
    at_once: int

    async def run(self, items: Iterator[JobItem], bar: ProgressBar) -> AsyncGenerator[Result]:
        """Yield the results in order; raises `JobsFailed` at the end, and what concerns all jobs at once.

        `items` is read on a thread: one that waits for more holds up no result.
        """
        reading: asyncio.Task[JobItem | None] | None = None
        running, failures = deque[tuple[JobItem, asyncio.Task[Result]]](), Failures()
        total, has_more = 0, True
        try:
            while has_more or running:
                if has_more and reading is None and len(running) < self.at_once:
                    reading = asyncio.create_task(asyncio.to_thread(next, items, None))
                first = () if not running else (running[0][1],)
                await asyncio.wait((*first, *(() if reading is None else (reading,))), return_when="FIRST_COMPLETED")
                if reading is not None and reading.done():
                    next_item, reading = reading.result(), None
                    if next_item is None:
                        has_more = False
                    else:
                        running.append((next_item, asyncio.create_task(self._one(total, next_item.parameters, bar))))
                        total += 1
                elif running and running[0][1].done():
                    index, (item, ended) = total - len(running), running.popleft()
                    if (error := ended.exception()) is None:
                        yield ended.result()
                    else:
                        failures.note(index, item, error)
        finally:
            bar.close()
            unfinished = (*(task for _, task in running), *(() if reading is None else (reading,)))
            for task in unfinished:
                task.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)
        if failures.by_number:
            raise JobsFailed(failures.by_number, total)

    async def _one(self, index: int, parameters: Mapping[str, Any], bar: ProgressBar) -> Result:
        try:
            result = replace(await self.finish(await self._submitted(parameters)), index=index)
        finally:
            bar.advance()
        return result if self.folder is None else await asyncio.to_thread(result.save, self.folder, name=f"{index:05}")

    async def _submitted(self, parameters: Mapping[str, Any]) -> Job:
        try:
            return await self.submit(parameters)
        except (RefusedError, InvalidArgument, OSError) as error:
            raise _Refused(error) from error
