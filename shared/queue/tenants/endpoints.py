"""The hash of a tenant's webhook endpoints, as JSON by their ids; `*` has the states that they want."""

import json
import math
from collections.abc import Mapping
from typing import Any

from shared.queue.transactions import Transaction


def subscribed_states(endpoints: Mapping[str, str]) -> str:
    """Return the states that enabled endpoints want, as `events.lua` reads them; empty without any."""
    wanted = {state for _, endpoint in enabled(endpoints) for state in endpoint["states"]}
    return f"|{'|'.join(sorted(wanted))}|" if wanted else ""


def enabled(endpoints: Mapping[str, str]) -> list[tuple[str, dict[str, Any]]]:
    """Return the ids of enabled endpoints, and what they are."""
    found = ((name, json.loads(wire)) for name, wire in endpoints.items() if name.startswith("we_"))
    return [(name, endpoint) for name, endpoint in found if endpoint["enabled"]]


def unexpired(endpoints: Mapping[str, str], now_ms: float) -> dict[str, str]:
    """Return a hash of endpoints without those that have expired."""
    return {
        name: wire
        for name, wire in endpoints.items()
        if not name.startswith("we_") or now_ms < json.loads(wire).get("expires_at_ms", math.inf)
    }


def write_endpoints(transaction: Transaction, name: str, before: Mapping[str, str], after: Mapping[str, str]) -> None:
    """Write what has changed in a hash of endpoints, with the states that are wanted now."""
    wanted = {**after, "*": subscribed_states(after)}
    for one in {**before, **wanted}:
        value = wanted.get(one) or None
        if value is None:
            transaction.write("HDEL", name, one)
        elif value != before.get(one):
            transaction.write("HSET", name, one, value)
