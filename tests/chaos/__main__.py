"""`python -m chaos`: run scenarios with real processes and print what the checker found."""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
from pathlib import Path

from harness import forks

from chaos.run import Run
from chaos.scenarios import SCENARIOS

MEMORY = Path("/dev/shm")  # on a disk, removing the 60,000 files of a long run takes minutes


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("scenarios", nargs="*", help=f"of: {', '.join(SCENARIOS)}; default: all")
    parser.add_argument("--seed", type=int, default=None, help="repeat the plan of this seed; default: a random one")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of the number of jobs and faults")
    options = parser.parse_args()
    forks.install()
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    failed = []
    for name in options.scenarios or SCENARIOS:
        print(f"{name}: make chaos SEED={seed} RUN={name}", flush=True)
        folder = Path(tempfile.mkdtemp(prefix=f"fusequeue-chaos-{name}-", dir=MEMORY if MEMORY.is_dir() else None))
        plan = SCENARIOS[name].plan(seed, options.scale)
        report = asyncio.run(Run(SCENARIOS[name], plan, folder).report())
        print("\n".join(report.lines()), flush=True)
        if report.problems:
            failed.append(name)
            print(f"  logs: {folder}", flush=True)
        else:
            shutil.rmtree(folder)
    print(f"failed: {', '.join(failed)}" if failed else "all promises held", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
