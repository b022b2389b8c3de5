"""`make fuzz`: each part sends what no client should, for its share of the time, to a stack of real processes.

`make fuzz SECONDS=60 SEED=7 PARTS="openapi raw_http"` repeats some parts of a run. Fails if a part finds a fault, a
process ends, or the API or the chores use more memory than their manifests allow.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from attack.stack import MIB, Stack, running

from fuzz import openapi

Report = Mapping[str, Any]
"""What a part has found: numbers by name, and `problems`, of which none may be left."""

SETTINGS = {"sync_wait_s": 2, "max_wait_s": 2, "sse_keepalive_s": 0.2, "retention_s": 600, "webhook_timeout_s": 2}
SHARES = {"openapi": 0.6, "raw_http": 0.2, "images": 0.1, "batch_files": 0.1}
"""Parts of a run, and their shares of its time."""


async def _openapi(stack: Stack, seed: int, seconds: float) -> Report:
    owner, other = stack.keys["owner"], stack.keys["other"]
    objects = await openapi.plant(stack.url, owner, random.Random(seed))
    return await asyncio.to_thread(openapi.run, stack.url, owner, other, objects, seed=seed, seconds=seconds)


async def _raw_http(stack: Stack, seed: int, seconds: float) -> Report:
    part = importlib.import_module("fuzz.raw_http")
    return dict(await asyncio.to_thread(part.run, "127.0.0.1", stack.cluster.api_port, seed, seconds))


async def _in_process(name: str, seed: int, seconds: float) -> Report:
    return dict(await asyncio.to_thread(importlib.import_module(f"fuzz.{name}").run, seed, seconds))


PARTS: Mapping[str, Callable[[Stack, int, float], Awaitable[Report]]] = {
    "openapi": _openapi,
    "raw_http": _raw_http,
    "images": lambda stack, seed, seconds: _in_process("images", seed, seconds),
    "batch_files": lambda stack, seed, seconds: _in_process("batch_files", seed, seconds),
}


async def fuzz(folder: Path, parts: list[str], seed: int, seconds: float) -> list[str]:
    """Run the parts in turn, print what each has found, and return the problems."""
    problems: list[str] = []
    shares = sum(SHARES[part] for part in parts)
    async with running(folder, "owner", "other", **SETTINGS) as stack:
        for part in parts:
            started = time.monotonic()
            try:
                report = await PARTS[part](stack, seed, seconds * SHARES[part] / shares)
            except AssertionError as error:
                report = {"problems": [str(error)]}
            facts = ", ".join(f"{name} {value}" for name, value in report.items() if name != "problems")
            print(f"{part}: {facts}, {time.monotonic() - started:.0f} s", flush=True)
            problems += [f"{part}: {problem}" for problem in report.get("problems", ())]
        peaks = ", ".join(f"{role} {peak // MIB} MiB" for role, peak in stack.memory.peaks.items())
        print(f"peak memory: {peaks}", flush=True)
        return [*problems, *stack.ended(), *stack.memory.excesses()]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"of: {', '.join(PARTS)}; default: all")
    parser.add_argument(
        "--seed", type=int, default=None, help="repeat the requests of this seed; default: a random one"
    )
    parser.add_argument("--seconds", type=float, default=300.0)
    options = parser.parse_args(argv)
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    parts = options.parts or list(PARTS)
    print(f"make fuzz SEED={seed} SECONDS={options.seconds:g} PARTS='{' '.join(parts)}'", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="fusequeue-fuzz-"))
    problems = asyncio.run(fuzz(folder, parts, seed, options.seconds))
    print("\n".join(problems) or "nothing found", flush=True)
    if problems:
        print(f"logs: {folder}", flush=True)
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
