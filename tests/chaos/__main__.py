"""`python -m chaos`: run scenarios with real processes and print what the checker found."""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from harness import forks

from chaos.checker import Report
from chaos.run import Run
from chaos.scenarios import SCENARIOS, named

MEMORY = Path("/dev/shm")  # on a disk, removing the 60,000 files of a long run takes minutes


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("scenarios", nargs="*", help=f"of: {', '.join(SCENARIOS)}, or how they begin; default: all")
    parser.add_argument("--seed", type=int, default=None, help="repeat the plan of this seed; default: a random one")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of the number of jobs and faults")
    options = parser.parse_args()
    forks.install()
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    names = [one for name in options.scenarios or SCENARIOS for one in named(name)]
    if unknown := [name for name in options.scenarios if not named(name)]:
        parser.error(f"unknown: {', '.join(unknown)}; there are: {', '.join(SCENARIOS)}")
    failed, clocked = [], {}
    for name in names:
        print(f"{name}: make chaos SEED={seed} RUN={name}", flush=True)
        folder = Path(tempfile.mkdtemp(prefix=f"fusequeue-chaos-{name}-", dir=MEMORY if MEMORY.is_dir() else None))
        plan = SCENARIOS[name].plan(seed, options.scale)
        report = asyncio.run(Run(SCENARIOS[name], plan, folder).report())
        print("\n".join(report.lines()), flush=True)
        if SCENARIOS[name].every_s:
            clocked[name] = report
        if report.problems:
            failed.append(name)
            print(f"  logs: {folder}", flush=True)
        else:
            shutil.rmtree(folder)
    print("\n".join(_table(clocked)))
    print(f"failed: {', '.join(failed)}" if failed else "all promises held", flush=True)
    return 1 if failed else 0


def _table(reports: Mapping[str, Report]) -> list[str]:
    """Return what losses of workers have cost, a line for each run."""
    lines = [f"{'':<26}{'jobs':>6}{'workers lost':>14}{'jobs run again':>16}{'steps / needed':>16}{'s':>6}"]
    for name, report in reports.items():
        counts = report.counts
        cost = counts["steps computed for them"] / max(1, counts["steps of results"])
        shown = (counts["succeeded"], counts["workers killed or stopped"], counts["jobs run again"], counts["seconds"])
        lines.append("{:<26}{:>6}{:>14}{:>16}{:>16.3f}{:>6}".format(name, *shown[:3], cost, shown[3]))
    return lines if reports else []


if __name__ == "__main__":
    sys.exit(main())
