"""`python -m bench.candidates`: what candidates gain on the demo model, and what dropping them early saves.

Runs the demo model with its scorer in an engine in this process. Held-out prompts are drawn with more guidance than
they bear, so that single images fail; the demo's checker reads the results. Then jobs with the same candidates run with
the worst dropped early and with all compared at the end, in turns. `--json FILE` saves the figures, `--plot FILE` draws
the share of prompts shown right over the computed steps, as SVG.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.common import record
from bench.common.plots import Line, line_plot
from demo.checker import matches
from demo.drawings import Prompt, split_prompts
from library import Engine
from shared.config.candidates import BestOf

DEMO = Path(__file__).parents[1] / "demo"
MAX_BATCH = 16
EARLY = BestOf(candidates=16, keep=4)
AT_THE_END = BestOf(candidates=16, keep=4, at=(1.0,))
ARMS: dict[str, BestOf | None] = {
    "n = 1": None,
    "best of 4": BestOf(candidates=4, at=(1.0,)),
    "16 pruned to 4": EARLY,
    "16 pruned to 1": BestOf(candidates=16, at=(0.25, 0.5, 1.0)),
}


@dataclass(frozen=True)
class Quality:
    """Shares of prompts whose best image, and of kept images, that show what they are to show."""

    arm: str
    steps: int
    computed_steps_per_prompt: float
    prompts: int
    right: float
    kept_right: float


class Rates(NamedTuple):
    """Kept images per second of wall time, and of CPU time, which depends less on other load."""

    wall: float
    cpu: float


def fields_of(best_of: BestOf | None, steps: int, guidance: float) -> dict[str, Any]:
    values: dict[str, Any] = {"steps": steps, "guidance_scale": guidance}
    return values if best_of is None else values | {"best_of": best_of.model_dump()}


def quality(engine: Engine, arm: str, prompts: Sequence[Prompt], steps: int, guidance: float) -> Quality:
    """Draw each prompt once, with a seed of its own."""
    best_of = ARMS[arm]
    items = [{"prompt": prompt.caption(), "seed": 1000 * at} for at, prompt in enumerate(prompts)]
    best, kept = list[bool](), list[bool]()
    for result in engine.stream(items, **fields_of(best_of, steps, guidance)):
        if result.error is not None:
            raise result.error
        shown = [matches(output.pixels, prompts[result.index]) for output in result.outputs]  # type: ignore[union-attr]
        best.append(shown[0])
        kept += shown
    computed = steps if best_of is None else best_of.candidates * best_of.mean_steps(steps)
    shares = round(statistics.mean(best), 3), round(statistics.mean(kept), 3)
    return Quality(arm, steps, computed, len(prompts), *shares)


def kept_per_second(engine: Engine, best_of: BestOf, prompts: Sequence[Prompt], steps: int) -> Rates:
    """Return the kept images per second of one turn, of wall time and of CPU time."""
    items = [{"prompt": prompt.caption(), "seed": at} for at, prompt in enumerate(prompts)]
    wall_s, cpu_s = time.monotonic(), time.process_time()
    kept = sum(len(result.outputs) for result in engine.stream(items, **fields_of(best_of, steps, 2.0)))
    return Rates(kept / (time.monotonic() - wall_s), kept / (time.process_time() - cpu_s))


def throughput(engine: Engine, turns: int, jobs: int, steps: int) -> dict[str, Any]:
    """Return the kept images per second with the worst dropped early and at the end, and the ratios of each turn."""
    _, prompts = split_prompts()
    rates: dict[str, list[Rates]] = {"early": [], "at the end": []}
    for turn in range(turns):
        for name in sorted(rates, reverse=turn % 2 == 1):
            best_of = EARLY if name == "early" else AT_THE_END
            rates[name].append(kept_per_second(engine, best_of, prompts[:jobs], steps))
            print(f"{name}: {rates[name][-1].wall:.2f} kept images/s", flush=True)
    pairs = list(zip(*rates.values(), strict=True))
    gains = [Rates(early.wall / late.wall, early.cpu / late.cpu) for early, late in pairs]
    computed = {name: 16 * one.mean_steps(steps) for name, one in (("early", EARLY), ("at the end", AT_THE_END))}
    return {
        "candidates": 16,
        "keep": 4,
        "steps": steps,
        "jobs_per_turn": jobs,
        "computed_steps_per_job": computed,
        "kept_images_per_second": {
            name: round(statistics.median(one.wall for one in values), 2) for name, values in rates.items()
        },
        "gain": round(statistics.median(gain.wall for gain in gains), 2),
        "gain_by_cpu_time": round(statistics.median(gain.cpu for gain in gains), 2),
        "gains_of_each_turn": [[round(gain.wall, 2), round(gain.cpu, 2)] for gain in gains],
    }


def plot(found: Sequence[Quality]) -> str:
    """Return the SVG of the shares over the computed steps."""
    lines = [
        Line(arm, [(one.computed_steps_per_prompt, 100 * one.right) for one in found if one.arm == arm]) for arm in ARMS
    ]
    return line_plot(lines, "computed steps per prompt", "prompts shown right, %")


def main(argv: list[str] | None = None) -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=112)
    parser.add_argument("--steps", type=int, nargs="+", default=[4, 6, 8, 12])
    parser.add_argument("--guidance", type=float, default=7.5)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=12, help="of each turn")
    parser.add_argument("--turn-steps", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    _, prompts = split_prompts()
    prompts = prompts[:: max(1, len(prompts) // options.prompts)][: options.prompts]
    table = {"max_batch": MAX_BATCH, "limits": {"max_images": MAX_BATCH}, "defaults": {"width": 64, "height": 64}}
    with Engine(DEMO / "model", device="cpu", scorer=str(DEMO / "scorer"), **table) as engine:
        gain = throughput(engine, options.turns, options.jobs, options.turn_steps)
        print(record.compact(gain), flush=True)
        found = []
        for arm in ARMS:
            for steps in options.steps:
                found.append(quality(engine, arm, prompts, steps, options.guidance))
                print(found[-1], flush=True)
    figures = {"guidance_scale": options.guidance, "quality": [asdict(one) for one in found], "throughput": gain}
    record.report(options.json, figures, threads=1)
    if options.plot is not None:
        options.plot.write_text(plot(found), "utf-8")


if __name__ == "__main__":
    main()
