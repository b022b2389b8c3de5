"""`make attack`: one tenant attacks, and what another one waits meanwhile is printed with its bound.

`make attack ATTACKS="event-streams bulk-requests"` runs some of them. Each attack has a stack of its own, with limits
that it can reach. Fails if a bound does not hold, a process ends, or the API or the chores use more memory than their
manifests allow.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from chaos.processes import ROOT, die_with_parent, wait_for
from harness.ports import free_port
from harness.webhook_receiver import receiving

from attack import connections, hosts, jobs, uploads
from attack.attacks import Target, encoded
from attack.stack import MIB, Stack, running
from attack.victim import BOUNDS_S, Victim

ATTACKS = ("none", *connections.ATTACKS, *jobs.ATTACKS, *uploads.ATTACKS, *hosts.ATTACKS)
SECONDS = 12.0
LEAD_S = 2.0
"""An attack has begun so much before the times count."""

OPEN_FILES = 700
"""Of the API: few, so that an attack reaches its limits; many where each connection costs memory or time."""

NEEDS_FILES = ("batch streams", "held lines", "slow downloads")

SETTINGS = {
    "fetch_allow_networks": "127.0.0.0/8",
    "fetch_allow_http": True,
    "output_allow_networks": "127.0.0.0/8",
    "output_allow_http": True,
    "sync_wait_s": 20,
}
PER_ADDRESS = {"max_connections_per_address": 200}
"""Addresses of this machine have no limit by default."""


@dataclass
class Result:
    """What an attack has done to the other tenant; `problems` are the bounds that did not hold."""

    name: str
    worst: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def row(self) -> str:
        times = [f"{self.worst[name]:.2f}" if name in self.worst else "-" for name in BOUNDS_S]
        peaks = [f"{self.peaks.get(role, 0) // MIB}" for role in ("api", "chores")]
        held = "held" if not self.problems else "NOT HELD"
        return f"| {self.name} | {' | '.join([*times, *peaks])} | {held} |"


def head() -> Iterator[str]:
    bounds = [f"{name} (bound {bound:g} s)" for name, bound in BOUNDS_S.items()]
    yield f"| attack | {' | '.join(bounds)} | API MiB | chores MiB | |"
    yield "|---|" + "---|" * (len(bounds) + 3)


async def measure(name: str, folder: Path, seconds: float) -> Result:
    """Run one attack against a new stack."""
    result = Result(name)
    hostile_port = free_port()
    with receiving() as receiver:
        hostile = str(hostile_port)
        ports = {"fetch_ports": hostile, "output_ports": hostile, "webhook_ports": f"{hostile},{receiver.port}"}
        files, limits = (None, {}) if name in NEEDS_FILES else (OPEN_FILES, PER_ADDRESS)
        prefix = name_server_prefix(folder) if name == "silent name servers" else ()
        async with running(
            folder, "hostile", "other", prefix=prefix, files=files, **SETTINGS, **ports, **limits
        ) as stack:
            victim = Victim(stack.url, stack.keys["other"], receiver)
            with attacking(name, stack, hostile_port, folder):
                await under_way(name, folder)
                await victim.run(seconds)
            result.worst, result.peaks = dict(victim.worst), dict(stack.memory.peaks)
            result.problems += [*victim.faults, *stack.ended(), *stack.memory.excesses()]
    for one, bound in BOUNDS_S.items():
        if victim.worst[one] > bound and not any(fault.startswith(f"{one}: ") for fault in victim.faults):
            result.problems.append(f"{one}: {victim.worst[one]:.1f} s, not {bound:g} s")
    result.counts = counts(folder)
    return result


def counts(folder: Path) -> dict[str, int]:
    """Return what the attack has counted so far."""
    log = folder / "attack.log"
    lines = log.read_text("utf-8").splitlines() if log.exists() else []
    return next((json.loads(line) for line in reversed(lines) if line.startswith("{") and line.endswith("}")), {})


async def under_way(name: str, folder: Path) -> None:
    """Wait until the attack has had its first responses, and `LEAD_S` more."""
    if name != "none":
        await wait_for(lambda: counts(folder), f"the attack begins; see {folder}")
    await asyncio.sleep(LEAD_S)


def name_server_prefix(folder: Path) -> tuple[str, ...]:
    """Return a command that starts its arguments with the attack's name server; for root, on Linux."""
    (folder / "resolv.conf").write_text(f"nameserver {hosts.NAME_SERVER}\n", "utf-8")
    mount = f'mount --bind {folder / "resolv.conf"} /etc/resolv.conf && exec "$@"'
    return ("unshare", "--mount", "sh", "-c", mount, "sh")


@contextlib.contextmanager
def attacking(name: str, stack: Stack, hostile_port: int, folder: Path) -> Iterator[None]:
    """Run an attack in a process of its own, which is killed at the end."""
    if name == "none":
        yield
        return
    target = Target(stack.cluster.api_port, stack.keys["hostile"].both, hostile_port)
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    with (folder / "attack.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "attack.attacks", name, encoded(target)],
            cwd=ROOT,
            env=env,
            stdout=log,
            stderr=log,
            preexec_fn=die_with_parent,
        )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make attack", description=__doc__)
    names = {name.replace(" ", "-"): name for name in ATTACKS}
    parser.add_argument("attacks", nargs="*", help=f"of: {', '.join(names)}; default: all")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time of each attack")
    options = parser.parse_args(argv)
    print("\n".join(head()), flush=True)
    problems: list[str] = []
    for chosen in options.attacks or names:
        name = names[chosen]
        if name == "silent name servers" and os.geteuid():
            print(f"| {name} | needs root: skipped |", flush=True)
            continue
        folder = Path(tempfile.mkdtemp(prefix=f"fusequeue-attack-{chosen}-"))
        try:
            result = asyncio.run(measure(name, folder, options.seconds))
        finally:
            shutil.rmtree(folder / "storage", ignore_errors=True)  # can be gigabytes
        print(result.row(), flush=True)
        print(f"  {result.counts}", file=sys.stderr, flush=True)
        problems += [f"{name}: {problem} ({folder})" for problem in result.problems]
        if not result.problems:
            shutil.rmtree(folder)
    print("\n".join(problems) or "all bounds held", flush=True)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
