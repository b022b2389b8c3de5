"""Pauses between the pieces of work on an adapter, which shares Python's lock with the forwards of jobs."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Pace = Callable[[], None]
T = TypeVar("T")


def no_pace() -> None:
    """Work without a pause."""


def paced(items: Iterable[T], pace: Pace) -> Iterator[T]:
    """Yield the items, with a call of `pace` after the work on each."""
    for item in items:
        yield item
        pace()
