"""Wake-ups: workers that wait are listed, and each gets a message when jobs that it can run are queued."""

from collections.abc import Sequence
from typing import NamedTuple

from shared.queue.client import QueueComponent
from shared.queue.connections.pools import MAX_BLOCK_MS
from shared.queue.script_arguments import Models, load_times


class WaitingList(NamedTuple):
    """How many workers wait for the same; whether jobs of the signature are queued and, for a busy worker, interactive
    ones of its models; and the wake-ups that an idle worker keeps, as their jobs are not ready."""

    workers: int
    is_queued: bool
    has_interactive: bool
    kept: tuple[str, ...]


class Wakeups(QueueComponent):
    """The wake-ups of the workers that wait."""

    async def list_as_waiting(
        self,
        worker: str,
        models: Models,
        *,
        wait_s: float,
        signature: str | None = None,
        idle: bool = True,
        unused: Sequence[str] = (),
    ) -> WaitingList:
        """List a worker as waiting for `wait_s`, so that it gets wake-ups (`wait`); pass its `unused` ones on.

        An idle worker waits for all jobs of `models`; a busy one for interactive jobs of `models`, and for jobs of
        `signature`, which it has free slots for. A wake-up goes to one worker. Without models and signature the worker
        is not listed any more.
        """
        lines, wait_ms = "\n".join(unused), max(1, round(wait_s * 1000))
        workers, queued, interactive, kept = await self._scripts.list_as_waiting(
            worker, wait_ms, lines, idle, signature or "", *load_times(models)
        )
        return WaitingList(workers, bool(queued), bool(interactive), tuple(kept))

    async def stop_waiting(self, worker: str, *, unused: Sequence[str] = ()) -> None:
        """Take a worker off the list of waiting ones, and pass on its wake-ups, the `unused` ones included."""
        await self.list_as_waiting(worker, (), wait_s=0, unused=unused)

    async def wait(self, worker: str, timeout_s: float) -> str | None:
        """Wait up to `timeout_s`, at most 2 s, for a wake-up; None without one.

        A worker that cannot use a wake-up passes it to `list_as_waiting`.
        """
        block_s = max(0.01, min(MAX_BLOCK_MS / 1000, timeout_s))
        reply = await self._client.command("BLPOP", self._keys.wakeup(worker), block_s, blocking=True)
        return None if reply is None else str(reply[1])
