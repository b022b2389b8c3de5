"""`python -m bench.peers`: fusequeue and general model servers with one pipeline, over HTTP, side by side.

The peers (LitServe, Mosec, Ray Serve, BentoML, FastAPI with rq) batch up to eight requests of equal steps; every server
has one model worker with one torch thread and a small Stable Diffusion 1.x, and responds with a PNG image in JSON. In
each turn every server is started, warmed up and measured in rotated order, between calls of the pipeline in this
process. Images per second (`closed-8`, `closed-32`, `mixed`: 32 clients, 6, 8 and 10 steps) are relative to full
batches, times (`closed-1`, and arrivals at random times at 0.6 and 0.9 of the rate of full batches) to a solo call.
Figures are medians over the turns. `--install` installs the peers. `--json FILE` saves the figures after each turn.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch

from bench.common import record
from bench.common.service import small_pipeline
from bench.peers.peer_loads import LOADS
from bench.peers.peer_report import figures_of
from bench.peers.peer_servers import FUSEQUEUE, PEERS, install
from bench.peers.side_by_side import PeerPlan, PeerTurns, SideBySide, core_taken


def installed(names: list[str]) -> list[str]:
    """Return the peers that are installed; prints how to install the others."""
    missing = [name for name in names if not PEERS[name].installed]
    for name in missing:
        print(f"{name} is skipped, it is not installed; install it: make peers PEERS={name}", file=sys.stderr)
    return [name for name in names if name not in missing]


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--images", type=int, default=192, help="of a closed loop in a turn; one client: a quarter")
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals at random times in a turn")
    parser.add_argument("--core-taken", action="store_true", help="another process keeps one core busy")
    parser.add_argument("--install", action="store_true", help="install the peers, and measure nothing")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


@torch.no_grad()
def measure(plan: PeerPlan, options: argparse.Namespace, folder: Path) -> PeerTurns:
    """Measure all turns."""
    pipeline = small_pipeline(folder / "model")
    turns, side_by_side = PeerTurns(), SideBySide(plan, pipeline, folder / "model", folder)
    with core_taken(folder) if options.core_taken else nullcontext():
        for turn in range(options.turns):
            side_by_side.run_turn(turn, turns)
            if options.json:  # after each turn: an interrupted run keeps its figures
                more = {name: getattr(options, name) for name in ("images", "seconds")}
                more |= {"core_taken": options.core_taken, "turns": turn + 1, "threads": 1}
                record.write(options.json, figures_of(turns), **more)
    return turns


def main(argv: list[str] | None = None) -> None:
    """Measure, print and save."""
    options = parse_options(argv)
    if options.install:
        for name in options.peers:
            install(PEERS[name])
        return
    plan = PeerPlan(
        servers=[FUSEQUEUE, *installed(options.peers)],
        loads=[load for load in LOADS.values() if load.name in options.loads],
        images=options.images,
        seconds=options.seconds,
    )
    with tempfile.TemporaryDirectory(prefix="fusequeue-bench-", ignore_cleanup_errors=True) as scratch:
        turns = measure(plan, options, Path(scratch))
    figures = figures_of(turns)
    record.report(None, {name: figures[name] for name in ("ratios", "fusequeue_to_best_peer")})
    for failure in turns.failures:
        print(f"failed: {failure}", file=sys.stderr)


if __name__ == "__main__":
    main()
