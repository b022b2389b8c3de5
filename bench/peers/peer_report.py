"""The figures of all turns: medians, and the table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from bench.peers.peer_servers import FUSEQUEUE
from bench.peers.side_by_side import MeasuredRow, PeerTurns

Medians = dict[str, dict[str, float]]


def lower_is_better(row: str) -> bool:
    """Whether a row holds times, not images per second."""
    return row == "closed-1" or row.startswith("poisson")


def medians(measured: Sequence[MeasuredRow], values: bool = False) -> Medians:
    """Return the medians over the turns by row and server: of the ratios, or of the values."""
    turns: dict[str, dict[str, list[float]]] = {}
    for one in measured:
        turns.setdefault(one.row, {}).setdefault(one.server, []).append(one.value if values else one.ratio)
    return {
        row: {server: round(statistics.median(seen), 4) for server, seen in servers.items()}
        for row, servers in turns.items()
    }


def best_peer(row: str, servers: dict[str, float]) -> str | None:
    """Return the peer with the best figure of a row."""
    peers = [server for server in servers if server != FUSEQUEUE]
    if not peers:
        return None
    return (min if lower_is_better(row) else max)(peers, key=lambda server: servers[server])


def to_best_peer(ratios: Medians) -> dict[str, float]:
    """Return fusequeue's figure over the best peer's, by row."""
    compared = {}
    for row, servers in ratios.items():
        best = best_peer(row, servers)
        if best and FUSEQUEUE in servers:
            compared[row] = round(servers[FUSEQUEUE] / servers[best], 3)
    return compared


def figures_of(turns: PeerTurns) -> dict[str, Any]:
    """Return what is saved."""
    ratios = medians(turns.measured)
    return {
        "ratios": ratios,
        "fusequeue_to_best_peer": to_best_peer(ratios),
        "images_per_second_or_seconds": medians(turns.measured, values=True),
        "turns": [
            {"turn": one.turn, "server": one.server, "row": one.row, "ratio": round(one.ratio, 3)}
            for one in turns.measured
        ],
        "failures": turns.failures,
    }
