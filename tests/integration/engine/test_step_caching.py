"""Step caching in running batches: fewer forwards, and images that do not depend on batch mates."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diffusers import DiffusionPipeline
from harness.engine import DIFFUSERS_AND_NUMPY, EngineHarness, EventRecorder, a_job, a_spec

from shared.config.request_limits import Defaults, Limits
from shared.config.step_schedules import StepSchedule, computed_steps, weights
from shared.job import Job
from shared.job_fields import Priority
from shared.tasks import Task
from worker.engine.pipelines.call_arguments import arguments_for
from worker.engine.pipelines.input_images import InputImages
from worker.engine.protocol import EngineEvent, JobProgress

pytestmark = [pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY), pytest.mark.usefixtures("shared_models")]

DEMO = Path(__file__).resolve().parents[3] / "demo" / "model"
THIRD = StepSchedule(every=3)
BATCHES = 4
SCHEDULES = (
    None,
    THIRD,
    StepSchedule(every=2, order="reuse"),
    StepSchedule(every=3, order="quadratic"),
    StepSchedule(every=4, first=2, last=1, of="residual"),
)


@pytest.fixture
def floats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output images as floats of 0 to 1, because 8 bits would hide small differences."""
    monkeypatch.setattr("worker.engine.pipelines.call_results.to_pixels", lambda image: image.float().cpu().numpy())


class ScriptedRecorder(EventRecorder):
    """A recorder that runs an action on the engine's thread once a job has reached a step."""

    def __init__(self, key: str, step: int) -> None:
        super().__init__()
        self.key, self.step = key, step
        self.action: Callable[[], None] | None = None

    def on_event(self, event: EngineEvent) -> None:
        super().on_event(event)
        reached = isinstance(event, JobProgress) and event.claim_key == self.key and event.step >= self.step
        if reached and self.action is not None:
            action, self.action = self.action, None
            action()


def a_cached_job(name: str, schedule: StepSchedule | None = THIRD, **fields: Any) -> Job:
    return a_job(name, **{"steps": 16, "step_cache": schedule, **fields})


def solo(source: Path, job: Job) -> np.ndarray:
    return EngineHarness(a_spec(source)).run(job).images[job.id, 0]


def difference(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one.astype(float) - other.astype(float)).max())


def psnr(one: np.ndarray, other: np.ndarray) -> float:
    return float(10 * np.log10(1 / np.square(one.astype(float) - other.astype(float)).mean()))


@pytest.mark.usefixtures("floats")
def test_fifty_steps_take_22_forwards_and_nearly_the_same_image() -> None:
    prompt = "a red circle on a blue ground, left"
    jobs = [a_job("off", prompt=prompt, seed=5, steps=50, guidance_scale=2.0)]
    jobs.append(jobs[0].model_copy(update={"id": "medium", "step_cache": THIRD}))
    recorder = EngineHarness(a_spec(DEMO)).run(*jobs)
    batching = {name: ended.batching for name, ended in recorder.finished.items()}
    assert (batching["off"].forwards, batching["off"].skipped_steps) == (50, 0)
    assert (batching["medium"].forwards, batching["medium"].skipped_steps) == (22, 28)
    assert psnr(recorder.images["medium", 0], recorder.images["off", 0]) > 40
    assert [entry for entry in recorder.log if entry[:2] == ("progress", "medium")][-1][2:] == (50, 50)


def cached_plainly(pipeline: Any, schedule: StepSchedule, steps: int, calls: int) -> None:
    """Replace the denoiser's forward of a plain pipeline that calls it `calls` times a step."""
    denoiser = getattr(pipeline, "unet", None) or pipeline.transformer
    forward, computed = denoiser.forward, set(computed_steps(steps, schedule))
    made, kept = 0, [list[tuple[int, Any]]() for _ in range(calls)]

    def cached(sample: Any = None, *args: Any, **kwargs: Any) -> Any:
        nonlocal made
        (step, place), made = divmod(made, calls), made + 1
        given = kwargs["hidden_states"] if sample is None else sample
        base = given if schedule.of == "residual" else 0
        if step in computed:
            output = forward(*(() if sample is None else (sample,)), *args, **kwargs)
            kept[place].append((step, output[0] - base))
            return output
        used = kept[place][-schedule.order.outputs :]
        factors = weights([at for at, _ in used], step)
        return (sum(factor * value for factor, (_, value) in zip(factors, used, strict=True)) + base,)

    denoiser.forward = cached


@pytest.mark.usefixtures("floats")
@pytest.mark.parametrize(
    ("family", "calls", "schedule"),
    [
        ("sd", 1, THIRD),
        ("sd", 1, StepSchedule(every=4, order="quadratic")),
        ("flux", 1, StepSchedule(every=3, of="residual")),
        ("qwen-image", 2, StepSchedule(every=2, order="reuse")),
    ],
)
def test_images_equal_those_of_a_pipeline_with_the_same_cache(
    family: str, calls: int, schedule: StepSchedule, tiny_model: Callable[[str], Path]
) -> None:
    """Guidance in one call with two rows, without guidance, and in two calls a step."""
    folder = tiny_model(family)
    job = a_cached_job("one", schedule, negative_prompt="a cat")
    recorder = EngineHarness(a_spec(folder, tasks=(Task.TEXT_TO_IMAGE,))).run(job, a_job("mate", steps=7))
    assert recorder.finished["one"].batching.forwards == calls * len(computed_steps(16, schedule))
    pipeline: Any = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    cached_plainly(pipeline, schedule, 16, calls)
    expected = pipeline(**arguments_for(pipeline, job, 0, InputImages())).images[0].float().cpu().numpy()
    assert difference(recorder.images["one", 0], expected) < 1e-4


def random_mates(rng: random.Random, at: int, reproducible: bool) -> list[Job]:
    return [
        a_cached_job(
            f"mate{at}-{other}",
            rng.choice(SCHEDULES),
            steps=rng.randint(3, 14),
            guidance_scale=rng.choice([1.0, 5.0]),
            reproducible=reproducible and rng.random() < 0.8,
            **({"strength": 0.7} if rng.random() < 0.3 else {}),
        )
        for other in range(rng.randint(1, 3))
    ]


@pytest.mark.usefixtures("floats")
@pytest.mark.parametrize(("family", "reproducible"), [("sd", False), ("flux", True)], ids=["sd", "flux-reproducible"])
def test_jobs_with_different_step_caches_equal_their_solo_runs_in_random_batches(
    family: str, reproducible: bool, tiny_models: Path
) -> None:
    """Bit by bit if they are reproducible."""
    rng = random.Random(11)
    ours = [a_cached_job(f"job{at}", SCHEDULES[1 + at], steps=12, reproducible=reproducible) for at in range(2)]
    harness = EngineHarness(a_spec(tiny_models / family))
    with harness.started():
        for job in ours:
            harness.submit(job)
            harness.recorder.wait_for([job.id])
        shared = 0
        for at in range(BATCHES):
            jobs = [job.model_copy(update={"id": f"{job.id}-{at}"}) for job in ours]
            jobs += random_mates(rng, at, reproducible)
            harness.submit(*rng.sample(jobs, len(jobs)))
            harness.recorder.wait_for([job.id for job in jobs])
            shared += sum(harness.recorder.finished[job.id].batching.max_jobs > 1 for job in jobs[:2])
    images = harness.recorder.images
    most = max(difference(images[f"{job.id}-{at}", 0], images[job.id, 0]) for job in ours for at in range(BATCHES))
    assert most == 0 if reproducible else most < 1e-4
    assert shared > 1.5 * BATCHES, "too few batches were shared"


def test_a_job_joins_between_skipped_steps_and_a_cancel_disturbs_no_other(tiny_models: Path) -> None:
    """Skipped steps take no rows: the forwards are those of the computed steps."""
    folder = tiny_models / "sd"
    first, leaves, late = a_cached_job("first"), a_cached_job("leaves", steps=30), a_cached_job("late", None, steps=3)
    recorder = ScriptedRecorder("first", 7)
    harness = EngineHarness(a_spec(folder), recorder=recorder)

    def join_and_cancel() -> None:
        harness.engine.cancel("leaves")
        harness.submit_prepared(late)

    recorder.action = join_and_cancel
    harness.submit(first, leaves)
    with harness.started():
        recorder.wait_for(["first", "leaves", "late"])
    assert recorder.finished["leaves"].canceled
    assert recorder.finished["late"].batching.max_jobs == 2
    assert recorder.finished["first"].batching.forwards == 10
    for job in (first, late):
        assert difference(recorder.images[job.id, 0], solo(folder, job)) <= 1


def test_a_preempted_job_goes_on_with_the_outputs_it_kept(tiny_models: Path) -> None:
    folder = tiny_models / "sd"
    bulk = a_cached_job("bulk", priority=Priority.BULK)
    interactive = a_cached_job("interactive", priority=Priority.INTERACTIVE)
    recorder = ScriptedRecorder("bulk", 7)
    harness = EngineHarness(a_spec(folder, max_batch=1, limits=Limits(max_images=1)), recorder=recorder)
    recorder.action = lambda: harness.submit(interactive)
    harness.submit(bulk)
    with harness.started():
        recorder.wait_for(["bulk", "interactive"])
    assert [entry[1] for entry in recorder.log if entry[0] == "output"] == ["interactive", "bulk"]
    assert len(recorder.rows) == 20, "no step is repeated"
    for job in (bulk, interactive):
        assert difference(recorder.images[job.id, 0], solo(folder, job)) <= 1


def test_previews_after_skipped_steps_change_nothing(tiny_models: Path) -> None:
    job = a_cached_job("one", previews=5)
    recorder = EngineHarness(a_spec(tiny_models / "sd")).run(job)
    assert len(recorder.previews) == 5
    assert recorder.finished["one"].batching.skipped_steps == 6
    assert difference(recorder.images["one", 0], solo(tiny_models / "sd", job.model_copy(update={"previews": 0}))) == 0


@pytest.mark.parametrize(
    ("fields", "computed"),
    [
        pytest.param({"steps": 30, "strength": 0.5}, 10, id="late start: 15 steps"),
        pytest.param({"steps": 12, "strength": 0.5}, 6, id="late start: 6 steps, none skipped"),
        pytest.param({"steps": 4}, 4, id="few steps"),
        pytest.param({"steps": 16, "scheduler": "HeunDiscreteScheduler"}, 19, id="two calls a step, the last has one"),
        pytest.param({"steps": 16, "scheduler": "PNDMScheduler"}, 19, id="nine calls more at the start"),
    ],
)
def test_the_steps_that_an_image_really_has_are_scheduled(
    fields: dict[str, Any], computed: int, tiny_models: Path
) -> None:
    spec = a_spec(tiny_models / "sd", schedulers=("HeunDiscreteScheduler", "PNDMScheduler"))
    recorder = EngineHarness(spec).run(a_cached_job("one", **fields))
    ended = recorder.finished["one"]
    assert ended.error is None
    assert ended.batching.forwards == computed


def test_two_denoisers_of_a_video_keep_outputs_of_their_own(tiny_model: Callable[[str], Path]) -> None:
    """Wan 2.2: the second one computes its first two steps."""
    spec = a_spec(
        tiny_model("wan-2.2-t2v"),
        tasks=(Task.TEXT_TO_VIDEO,),
        limits=Limits(multiple_of=16, max_frames=5, frames_multiple=4),
        defaults=Defaults(width=64, height=64, frames=5, guidance_scale_2=3.0),
    )
    jobs = [
        a_cached_job(name, schedule, task=Task.TEXT_TO_VIDEO, frames=5, fps=8, guidance_scale_2=3.0, steps=14)
        for name, schedule in (("off", None), ("cached", THIRD))
    ]
    together = EngineHarness(spec).run(*jobs)
    assert {name: ended.error for name, ended in together.finished.items()} == dict.fromkeys(together.finished)
    assert together.finished["cached"].batching.skipped_steps > 0
    for job in jobs:
        by_itself = EngineHarness(spec).run(job)
        assert difference(together.images[job.id, 0], by_itself.images[job.id, 0]) <= 1
        assert by_itself.finished[job.id].batching.forwards == together.finished[job.id].batching.forwards


def test_kept_outputs_count_as_memory(tiny_models: Path) -> None:
    """While a job runs, and not after it."""
    recorder = ScriptedRecorder("one", 7)
    harness = EngineHarness(a_spec(tiny_models / "sd"), recorder=recorder)
    seen: list[int] = []
    recorder.action = lambda: seen.append(harness.engine.status().models_bytes)
    harness.submit(a_cached_job("one"))
    with harness.started() as engine:
        recorder.wait_for(["one"])
        after = engine.status().models_bytes
    assert 0 < seen[0] - after < 1_000_000
