"""A job for each of many prompts: as many at a time as the service makes together, with results in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from fusequeue.arguments import key
from fusequeue.errors import InvalidArgument, JobFailed, JobsFailed
from fusequeue.progress_bar import ProgressBar
from fusequeue.response_types import Job, Result

Prompt: TypeAlias = str | Mapping[str, Any]
"""A text, or the parameters in which a job differs: `prompt` and others."""

Submit: TypeAlias = Callable[[Mapping[str, Any]], Awaitable[Job]]
Finish: TypeAlias = Callable[[Job], Awaitable[Result]]


def job_parameters(prompts: Iterable[Prompt], common: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Return the parameters of each job; an `idempotency_key` of all gets the number of each."""
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable):
        raise InvalidArgument(f"prompts: {prompts!r:.80} is no list; `run` takes one prompt")
    return (_parameters(index, prompt, common) for index, prompt in enumerate(prompts))


def _parameters(index: int, prompt: Prompt, common: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(prompt, str | Mapping):
        raise InvalidArgument(f"prompts: {prompt!r:.80} is no text, and no parameters of a job")
    own = {"prompt": prompt} if isinstance(prompt, str) else dict(prompt)
    name = common.get("idempotency_key")
    numbered = {} if name is None else {"idempotency_key": key(f"{name}-{index}", "")}
    return {**common, **numbered, **own}


@dataclass(frozen=True)
class JobMap:
    """Runs jobs, at most `at_once` at a time; each result is saved in `folder` under the number of its prompt."""

    submit: Submit
    finish: Finish
    folder: Path | None
    at_once: int

    async def run(self, jobs: Iterator[dict[str, Any]], bar: ProgressBar) -> AsyncGenerator[Result]:
        """Yield the results in order; raises `JobsFailed` at the end, and any other error at once.

        `jobs` is read on a thread: one that waits for more holds up no result.
        """
        reading: asyncio.Task[dict[str, Any] | None] | None = None
        running, failures = deque[asyncio.Task[Result]](), dict[int, JobFailed]()
        total, has_more = 0, True
        try:
            while has_more or running:
                if has_more and reading is None and len(running) < self.at_once:
                    reading = asyncio.create_task(asyncio.to_thread(next, jobs, None))
                first = () if not running else (running[0],)
                await asyncio.wait((*first, *(() if reading is None else (reading,))), return_when="FIRST_COMPLETED")
                if reading is not None and reading.done():
                    parameters, reading = reading.result(), None
                    if parameters is None:
                        has_more = False
                    else:
                        running.append(asyncio.create_task(self._one(total, parameters, bar)))
                        total += 1
                elif running and running[0].done():
                    index, ended = total - len(running), running.popleft()
                    if isinstance(error := ended.exception(), JobFailed):
                        failures[index] = error
                    else:
                        yield ended.result()
        finally:
            bar.close()
            unfinished = (*running, *(() if reading is None else (reading,)))
            for task in unfinished:
                task.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)
        if failures:
            raise JobsFailed(failures, total)

    async def _one(self, index: int, parameters: Mapping[str, Any], bar: ProgressBar) -> Result:
        result = await self._ended(await self.submit(parameters), bar)
        result = replace(result, index=index)
        return result if self.folder is None else await asyncio.to_thread(result.save, self.folder, name=f"{index:05}")

    async def _ended(self, job: Job, bar: ProgressBar) -> Result:
        try:
            return await self.finish(job)
        finally:
            bar.advance()
