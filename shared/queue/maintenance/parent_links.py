"""Whether a job that waits for others is among those that are told of their ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from shared.queue.maintenance.dependents import UNFINISHED
from shared.queue.redis_keys import RedisKeys
from shared.queue.transactions import Command

Reply: TypeAlias = str | int | None


class _Link(NamedTuple):
    """What Redis has of a job and one of its parents: the parent's `state`, None of one that is gone, and the job's
    scores among those that wait for it and those that are to be told of its end."""

    state: Reply
    waits: Reply
    told: Reply

    @property
    def is_lost(self) -> bool:
        return (self.waits if self.state in UNFINISHED else self.told) is None


def link_reads(keys: RedisKeys, job_id: str, events: Mapping[str, str]) -> list[Command]:
    """Return the reads of the links of a job to its parents; `events` are the last ones of these."""
    reads: list[Command] = [("EXISTS", keys.ended_parents)]
    for parent, event in events.items():
        reads += [
            ("HGET", keys.job(parent), "state"),
            ("ZSCORE", keys.children(parent), job_id),
            ("ZSCORE", keys.told(event), job_id),
        ]
    return reads


def is_link_lost(is_telling: Reply, *replies: Reply) -> bool:
    """Return whether a link of a job to a parent is lost; of a parent that is gone it shows when all jobs are told."""
    links = list(_links(replies))
    if is_telling and any(link.state is None for link in links):
        return False
    return any(link.is_lost for link in links)


def ended_parents(parents: Iterable[str], replies: Sequence[Reply]) -> str:
    """Return the parents that have ended with their states, as `wait_for_parents` of a transaction takes them."""
    states = {parent: link.state for parent, link in zip(parents, _links(replies[1:]), strict=True)}
    return " ".join(f"{parent}={state or 'gone'}" for parent, state in states.items() if state not in UNFINISHED)


def _links(replies: Sequence[Reply]) -> Iterator[_Link]:
    return (_Link(*replies[first : first + 3]) for first in range(0, len(replies), 3))
