"""What one protocol adds to the chores and to webhooks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from api.webhook_messages import WebhookEvent


class PeriodicChore(NamedTuple):
    """A chore that runs every `every_s` seconds; `function` is its dotted path."""

    name: str
    function: str
    every_s: int


@dataclass(frozen=True)
class ChorePart:
    """`events` are the names of events to which endpoints can subscribe, `batch_chores` the chores of batches.

    `webhook_body` returns the body of a protocol's event; None: the event is not the protocol's.
    """

    webhook_body: Callable[[WebhookEvent], bytes | None]
    events: tuple[str, ...] = ()
    batch_chores: tuple[PeriodicChore, ...] = ()
