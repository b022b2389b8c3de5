"""`python -m bench.engine.masks`: padding and a mask compared with one forward for each length of the texts.

Calls of a small Qwen-Image denoiser, in turns of alternating order; ratios are medians over the turns. *Mask* is the
time of a forward of equal lengths with a mask that hides nothing, relative to none: the mask's tax. *Grouped* is the
time of one forward for each length, relative to one forward of all rows, padded and masked: below 1, grouping pays.
`--json FILE` saves the figures.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from diffusers import QwenImageTransformer2DModel

from bench.common import record
from bench.engine.shapes import disable_progress_bars
from worker.engine.fusion.fused_call import run_fused
from worker.engine.fusion.module_proxy import ParkedCall, SharedMethod

WIDTH, CHANNELS = 256, 64
SIDES = (128, 256, 512)  # pixels; a token has 16 by 16
LENGTHS = ((24, 24, 120, 120), (24, 56, 88, 120), (112, 120, 112, 120))
Times = dict[str, list[float]]


@dataclass(frozen=True)
class MaskResult:
    """Medians for texts of `lengths`, with images `side` by `side` pixels."""

    side: int
    lengths: Sequence[int]
    equal_ms: float
    mask: float
    grouped: float

    def __str__(self) -> str:
        texts = ", ".join(map(str, self.lengths))
        return f"| {self.side}² | {texts} | {self.equal_ms:.0f} | {self.mask:.3f} | {self.grouped:.3f} |"


def denoiser(device: str, dtype: torch.dtype) -> SharedMethod:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        module = QwenImageTransformer2DModel(
            in_channels=CHANNELS,
            num_layers=4,
            attention_head_dim=64,
            num_attention_heads=WIDTH // 64,
            joint_attention_dim=WIDTH,
            axes_dims_rope=(16, 24, 24),
        )
    return SharedMethod("transformer", "forward", module.to(device, dtype).eval(), lean=True)


def a_call(method: SharedMethod, side: int, length: int, *, masked: bool = False) -> ParkedCall:
    """Return a call for one image with a text of `length` tokens; `masked`: with a mask that hides nothing."""
    cells = side // 16
    some = next(method.module.parameters())
    arguments = {
        "hidden_states": torch.randn(1, cells * cells, CHANNELS).to(some),
        "encoder_hidden_states": torch.randn(1, length, WIDTH).to(some),
        "timestep": torch.tensor([0.5]).to(some),
        "img_shapes": [[(1, cells, cells)]],
        "return_dict": False,
    }
    if masked:
        arguments["encoder_hidden_states_mask"] = torch.ones(1, length, dtype=torch.bool, device=some.device)
    return ParkedCall(method, (), arguments)


def measure(method: SharedMethod, side: int, lengths: Sequence[int], repeats: int) -> MaskResult:
    """Return the medians for one case."""
    longest = max(lengths)
    mixed = [a_call(method, side, length) for length in lengths]
    groups = [[call for call, one in zip(mixed, lengths, strict=True) if one == length] for length in set(lengths)]
    plain, masked = ([a_call(method, side, longest, masked=given) for _ in lengths] for given in (False, True))
    forwards: dict[str, Sequence[Sequence[ParkedCall]]] = {
        "plain": [plain],
        "masked": [masked],
        "padded": [mixed],
        "grouped": groups,
    }
    times: Times = {name: [] for name in forwards}
    for turn in range(-1, repeats):  # the first warms up
        for name, calls in sorted(forwards.items(), reverse=bool(turn % 2)):
            seconds = _seconds(lambda calls=calls: [run_fused(group) for group in calls])  # type: ignore[misc]
            if turn >= 0:
                times[name].append(seconds)
    equal_ms = round(1000 * statistics.median(times["plain"]), 1)
    return MaskResult(side, lengths, equal_ms, _ratio(times, "masked", "plain"), _ratio(times, "grouped", "padded"))


def _seconds(run: Callable[[], object]) -> float:
    """Return the CPU time of `run`, which depends less on other load; with a GPU the time until it is done."""
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    started = clock()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock() - started


def _ratio(times: Times, name: str, other: str) -> float:
    return round(statistics.median(one / two for one, two in zip(times[name], times[other], strict=True)), 3)


@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--sides", type=int, nargs="+", default=SIDES)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    disable_progress_bars()
    method = denoiser(options.device, getattr(torch, options.dtype))
    print("| images | tokens of the texts | equal lengths, ms | mask | grouped |\n|---|---|---|---|---|")
    results = []
    for side in options.sides:
        for lengths in LENGTHS:
            results.append(measure(method, side, lengths, options.repeats))
            print(results[-1], flush=True)
    if options.json:
        record.write(options.json, {"results": [asdict(result) for result in results]}, dtype=options.dtype)


if __name__ == "__main__":
    main()
