"""`python -m bench.gpu.speed SHAPE`: the engine against the plain pipeline at real size, in bfloat16.

Both run in this process on the same weights, without other load. For each size and number of rows: the pipeline's call
with as many prompts, and the engine with as many jobs; then the engine with more jobs than rows, of mixed steps, and
jobs with prompts of different lengths beside those of one. With one and two rows images per second are those of the
faster of two turns. The gaps are the device's time between two forwards of the denoiser, by events on the device, as a
share of the time from the first forward to the last.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.engine import shapes
from bench.engine.runner import EngineRunner, bench_job, prompt
from bench.gpu.made_models import billions, denoiser_of, make, save_folder, use_made_models
from bench.gpu.stage import DEVICE, DRY, Figures, Stage, peak_gib, synchronize
from shared.config.model_spec import ModelSpec
from shared.config.request_limits import Defaults, Limits
from shared.job import Job
from shared.runtime import log
from shared.tasks import Task


class Size(NamedTuple):
    """What is measured at one size; `seconds` are what it needs at most."""

    width: int
    height: int
    steps: int
    rows: tuple[int, ...]
    seconds: float


class Work(NamedTuple):
    """What is measured of a shape."""

    sizes: tuple[Size, ...]
    guidance: float
    frames: int = 1

    @property
    def is_video(self) -> bool:
        return self.frames > 1


WORK = {
    "z-image": Work((Size(512, 512, 8, (1, 2, 4, 8), 10), Size(1024, 1024, 3, (1, 4, 8), 12)), 0.0),
    "flux": Work((Size(512, 512, 6, (1, 2, 4, 8), 12), Size(1024, 1024, 3, (1, 4), 14)), 3.5),
    "sdxl": Work((Size(512, 512, 8, (1, 2, 4, 8), 10), Size(1024, 1024, 4, (1, 4, 8), 12)), 5.0),
    "qwen-image": Work((Size(512, 512, 6, (1, 2, 4, 8), 12), Size(1024, 1024, 3, (1, 4), 14)), 1.0),
    "wan-2.1-t2v": Work((Size(832, 480, 3, (1, 2, 4), 20),), 5.0, frames=17),
}
TINY_SIZES = (Size(64, 64, 3, (1, 2), 1),)
STEP_CHANGES = (-2, 0, 2)  # of jobs of mixed steps
FEWEST_STEPS = 2  # of Qwen-Image, whose schedule is stretched to a last value
WORDS = (4, 60, 12, 30)  # of prompts of different lengths


def work_of(shape: str) -> Work:
    """Return what is measured of a shape, in a dry run in the smallest form."""
    work = WORK[shape]
    return work._replace(sizes=TINY_SIZES, frames=min(work.frames, 5)) if DRY else work


class ForwardGaps:
    """Events before and after each forward of a denoiser, on the device."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._marks: list[Any] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        run = self._module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            self._marks.append(self._mark())
            output = run(*args, **kwargs)
            self._marks.append(self._mark())
            return output

        self._marks.clear()
        self._module.forward = forward
        try:
            yield
        finally:
            del self._module.forward

    def figures(self) -> Figures:
        """Return forwards, the mean of their milliseconds, and the share of the gaps between them."""
        synchronize()
        starts, ends = self._marks[::2], self._marks[1::2]
        inside = sum(self._between(*pair) for pair in zip(starts, ends, strict=True))
        whole = self._between(starts[0], ends[-1])
        return {
            "forwards": len(starts),
            "forward_ms": round(inside / len(starts), 1),
            "gap_share": round(max(0.0, 1 - inside / whole), 4),
        }

    def _mark(self) -> Any:
        if DRY:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> float:
        return float(1000 * (end - start)) if DRY else float(start.elapsed_time(end))


class Shape:
    """A shape's plain pipeline and an engine with it."""

    def __init__(self, name: str, work: Work, folder: Path, **fields: Any) -> None:
        self.work, self.turn = work, 0
        width, height, steps, rows, _ = work.sizes[0]
        task = Task.TEXT_TO_VIDEO if work.is_video else Task.TEXT_TO_IMAGE
        multiple = 4 if work.is_video else 1
        started = time.perf_counter()
        self.pipeline = make(name)
        synchronize()
        self.made_s = time.perf_counter() - started
        self.gaps = ForwardGaps(denoiser_of(self.pipeline))
        self.spec = ModelSpec(
            id=name,
            source=str(folder),
            tasks=(task,),
            max_batch=max(rows),
            dtype="bfloat16",
            limits=Limits(multiple_of=16, max_images=1, max_frames=work.frames, frames_multiple=multiple),
            defaults=Defaults(width=width, height=height, steps=steps, fps=16),
            **fields,
        )
        started = time.perf_counter()
        self.runner = EngineRunner(self.spec, DEVICE, torch.get_num_threads() if DRY else 4)
        self.loaded_s = time.perf_counter() - started

    def plain(self, width: int, height: int, steps: int, rows: int) -> None:
        """Call the pipeline for `rows` prompts, and copy the results to the host."""
        self.turn += 1
        texts = [f"{prompt(at)}, {self.turn}" for at in range(rows)]
        frames = {"num_frames": self.work.frames} if self.work.is_video else {}
        result = self.pipeline(
            prompt=texts,
            width=width,
            height=height,
            num_inference_steps=steps,
            guidance_scale=self.work.guidance,
            generator=[torch.Generator().manual_seed(at) for at in range(rows)],
            output_type="pt",
            **frames,
        )
        output = result.frames if self.work.is_video else result.images
        (output.float() * 255).round().to(torch.uint8).cpu()

    def jobs(self, width: int, height: int, steps: Sequence[int], **fields: Any) -> list[Job]:
        """Return a job for each number of steps, with new prompts, of one length unless `fields` has their `words`."""
        self.turn += 1
        if self.work.is_video:
            fields |= {"task": Task.TEXT_TO_VIDEO, "frames": self.work.frames, "fps": 16}
        words = fields.pop("words", (0,))
        fields |= {"height": height, "guidance_scale": self.work.guidance}
        texts = [f"{prompt(at)}, {self.turn}" + " boat" * words[at % len(words)] for at in range(len(steps))]
        return [
            bench_job(f"{self.turn}-{at}", self.spec, width, text, seed=at, steps=count, **fields)
            for at, (text, count) in enumerate(zip(texts, steps, strict=True))
        ]

    def engine(self, width: int, height: int, steps: Sequence[int], **fields: Any) -> None:
        """Run a job for each number of steps together."""
        self.runner.run(self.jobs(width, height, steps, **fields))

    def close(self) -> None:
        self.runner.close()


def timed(shape: Shape, images: int, run: Callable[[], None]) -> Figures:
    """Return images per second, the gaps between forwards and the peak of memory; with few rows of the faster turn."""
    best: Figures = {"images_s": 0.0}
    peak_gib(reset=True)
    for _ in range(2 if images <= 2 else 1):
        shape.runner.rows.clear()
        with shape.gaps.watched():
            synchronize()
            started = time.perf_counter()
            run()
            synchronize()
            rate = images / (time.perf_counter() - started)
        if rate > best["images_s"]:
            best = {"images_s": rate, **shape.gaps.figures()}
    if shape.runner.rows:
        best["rows_per_forward"] = round(statistics.mean(shape.runner.rows), 2)
    return {**best, "images_s": round(best["images_s"], 3), "peak_gib": peak_gib()}


class SizeTurns:
    """The turns of both methods at one size, and the rates that later turns are relative to."""

    def __init__(self, shape: Shape, size: Size) -> None:
        self._shape, self._size = shape, size
        self._side = (size.width, size.height)
        self._batched: dict[int, float] = {}
        self._alike: dict[int, float] = {}

    def warm_up(self, _figures: Figures, rows: int) -> None:
        self._shape.plain(*self._side, FEWEST_STEPS, rows)
        self._shape.engine(*self._side, [FEWEST_STEPS] * rows)

    def plain(self, figures: Figures, rows: int) -> None:
        figures |= timed(self._shape, rows, lambda: self._shape.plain(*self._side, self._size.steps, rows))
        self._batched[rows] = figures["images_s"]

    def engine(self, figures: Figures, rows: int) -> None:
        figures |= self._timed_engine([self._size.steps] * rows)
        figures["of_plain"] = _relative(figures["images_s"], self._batched.get(rows))
        self._alike[rows] = figures["images_s"]

    def lengths(self, figures: Figures, rows: int) -> None:
        figures |= self._timed_engine([self._size.steps] * rows, words=WORDS)
        figures["of_one_length"] = _relative(figures["images_s"], self._alike.get(rows))

    def mixed(self, figures: Figures, rows: int) -> None:
        steps = [max(FEWEST_STEPS, self._size.steps + change) for _ in range(rows // 2 + 1) for change in STEP_CHANGES]
        figures |= self._timed_engine(steps)
        # As if all had the steps of the other turns.
        rate = figures["images_s"] * sum(steps) / len(steps) / self._size.steps
        figures["of_plain"] = _relative(rate, self._batched.get(rows))
        figures["of_one_by_one"] = _relative(rate, self._batched.get(1))

    def _timed_engine(self, steps: Sequence[int], **fields: Any) -> Figures:
        return timed(self._shape, len(steps), lambda: self._shape.engine(*self._side, steps, **fields))


def measure_size(stage: Stage, shape: Shape, size: Size) -> None:
    """Measure all numbers of rows at one size; each result is written at once."""
    names = {"shape": shape.spec.id, "size": f"{size.width}x{size.height}", "steps": size.steps}
    turns, share_s = SizeTurns(shape, size), size.seconds / 4
    for rows in size.rows:
        for method, work in {"first use": turns.warm_up, "plain": turns.plain, "engine": turns.engine}.items():
            stage.run(partial(work, rows=rows), share_s, **names, rows=rows, method=method)
    if not shape.work.is_video:
        for method, work in {"prompts of four lengths": turns.lengths, "mixed steps": turns.mixed}.items():
            stage.run(partial(work, rows=max(size.rows)), 2 * share_s, **names, rows=max(size.rows), method=method)


def _relative(rate: float, other: float | None) -> float | None:
    return None if other is None else round(rate / other, 3)


@torch.no_grad()
def main(name: str) -> None:
    stage = Stage(f"speed-{name}")
    log.configure("WARNING")
    shapes.disable_progress_bars()
    use_made_models()
    work = work_of(name)
    with tempfile.TemporaryDirectory() as scratch:
        folder = save_folder(name, Path(scratch) / "model")
        stage.wait_for_turn()
        shape = Shape(name, work, folder)
        loaded = next(iter(shape.runner.models), None)
        stage.emit(
            shape=name,
            method="load",
            billions=billions(shape.pipeline),
            made_s=round(shape.made_s, 1),
            check_and_warm_up_s=round(shape.loaded_s, 1),
            solo_reason=loaded.solo_reason if loaded else "it did not load",
        )
        try:
            for size in work.sizes:
                measure_size(stage, shape, size)
        finally:
            shape.close()


if __name__ == "__main__":
    main(sys.argv[1])
