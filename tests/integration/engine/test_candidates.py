"""Candidates of a job: the worst are dropped at some steps, the others are the images that they would be alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.engine import DIFFUSERS_AND_NUMPY, EngineHarness, EventRecorder, a_job, a_spec
from harness.scorers import save_scorer
from safetensors.torch import save_file
from transformers import CLIPImageProcessorPil, CLIPModel, CLIPTokenizer

from shared.config.candidates import BestOf, ScorerSpec
from shared.config.model_spec import ModelSpec
from shared.config.request_limits import Limits
from shared.job import Job
from worker.engine.protocol import EngineEvent

pytestmark = [pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY), pytest.mark.usefixtures("shared_models")]

DEMO = Path(__file__).resolve().parents[3] / "demo" / "model"
PROMPT = "a red circle on a blue ground, left"
STEPS = 8
EIGHT = BestOf(candidates=8, keep=2)


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_scorer(tmp_path_factory.mktemp("scorer"))


def scored_spec(scorer: Path, source: Path = DEMO, head: Path | None = None, **fields: Any) -> ModelSpec:
    spec = ScorerSpec(source=str(scorer), head=None if head is None else str(head))
    return a_spec(source, limits=Limits(multiple_of=16, max_images=8), scorer=spec, **fields)


def a_contest(name: str, best_of: BestOf = EIGHT, **fields: Any) -> Job:
    return a_job(name, **{"prompt": PROMPT, "steps": STEPS, "best_of": best_of, "n": best_of.keep, **fields})


def alone(job: Job, candidate: int) -> Job:
    update = {"id": f"{job.id}-{candidate}", "seed": job.seed + candidate, "best_of": None, "n": 1}
    return job.model_copy(update=update)


def kept(recorder: EventRecorder, job: Job) -> list[tuple[int | None, float | None]]:
    outputs = [recorder.outputs[job.id, index] for index in range(job.n)]
    return [(output.candidate, output.score) for output in outputs]


def test_the_worst_are_dropped_and_the_others_are_as_they_would_be_alone(scorer: Path) -> None:
    job = a_contest("contest")
    made = EngineHarness(scored_spec(scorer)).run(job)
    assert made.rows == [8, 8, 4, 4, 2, 2, 2, 2]
    finished = made.finished[job.id]
    assert finished.error is None
    dropped = finished.batching.dropped
    assert [one.step for one in dropped] == [2] * 4 + [4] * 2
    winners, scores = zip(*kept(made, job), strict=True)
    assert {*winners, *(one.candidate for one in dropped)} == set(range(8))
    assert list(scores) == sorted(scores, reverse=True), "the best is first"
    last = [one.score for one in dropped if one.step == 4]
    assert all(score is not None and score <= min(scores) for score in last)
    plain = EngineHarness(scored_spec(scorer)).run(*(alone(job, number) for number in winners))
    for index, number in enumerate(winners):
        difference = np.abs(made.images[job.id, index].astype(int) - plain.images[f"{job.id}-{number}", 0])
        assert difference.max() <= 2


def test_progress_and_device_times_count_what_ran(scorer: Path) -> None:
    job = a_contest("contest")
    made = EngineHarness(scored_spec(scorer)).run(job)
    progress = [entry[2:] for entry in made.log if entry[0] == "progress"]
    assert progress[-1] == (32, 32), "8 candidates take 2 steps, 4 take 2, and 2 take 4"
    times = made.finished[job.id].device_times
    assert times is not None
    assert times.step_s * (32 / 8) == pytest.approx(times.run_s - times.rest_s, rel=0.01)
    assert [entry[2] for entry in made.log if entry[0] == "dropped"] == [4, 2]


def test_previews_are_those_of_the_images_that_are_kept(scorer: Path) -> None:
    made = EngineHarness(scored_spec(scorer)).run(a_contest("contest", previews=3))
    previews = [entry[2] for entry in made.log if entry[0] == "preview"]
    assert sorted(previews) == [0, 0, 1, 1], "after 4 of 8 steps, when the last are dropped, and after 6"
    last_drop = max(at for at, entry in enumerate(made.log) if entry[0] == "dropped")
    assert all(at > last_drop for at, entry in enumerate(made.log) if entry[0] == "preview")


def test_scores_do_not_depend_on_batch_mates(scorer: Path) -> None:
    contests = [a_contest("first", steps=7), a_contest("second", BestOf(candidates=4, keep=1, at=(0.5, 1.0)))]
    spec = scored_spec(scorer, max_batch=8)
    together = EngineHarness(spec).run(*contests, a_job("third", prompt=PROMPT, steps=9, n=3))
    for job in contests:
        by_itself = EngineHarness(spec).run(job)
        assert [number for number, _ in kept(together, job)] == [number for number, _ in kept(by_itself, job)]
        pairs = zip(*(made.finished[job.id].batching.dropped for made in (together, by_itself)), strict=True)
        for one, other in pairs:
            assert one.candidate == other.candidate
            assert one.score == pytest.approx(other.score, abs=2e-4)


def test_other_jobs_take_the_rows_of_dropped_candidates(scorer: Path) -> None:
    jobs = [a_contest("contest"), a_job("mate", prompt=PROMPT, steps=STEPS, n=4)]
    made = EngineHarness(scored_spec(scorer, max_batch=8)).run(*jobs)
    assert made.rows[:5] == [8, 8, 8, 8, 6], "4 of the mate's images join after 4 candidates are dropped"
    assert made.finished["mate"].batching.max_jobs == 2


def test_a_reproducible_job_keeps_the_same_bits(scorer: Path) -> None:
    job = a_contest("contest", reproducible=True)
    mate = a_contest("mate", BestOf(candidates=5, keep=2), reproducible=True, prompt="a green cross on a white ground")
    spec = scored_spec(scorer)
    made, beside = EngineHarness(spec).run(job), EngineHarness(spec).run(job, mate)
    assert kept(made, job) == kept(beside, job)
    assert made.finished[job.id].batching.dropped == beside.finished[job.id].batching.dropped
    for index in range(job.n):
        assert np.array_equal(made.images[job.id, index], beside.images[job.id, index])


def test_the_score_of_a_finished_image_is_that_of_clip(scorer: Path) -> None:
    job = a_contest("contest", BestOf(candidates=4, keep=3, at=(1.0,)))
    made = EngineHarness(scored_spec(scorer)).run(job)
    model, tokenizer = CLIPModel.from_pretrained(scorer), CLIPTokenizer.from_pretrained(scorer)
    images = [made.images[job.id, index] for index in range(job.n)]
    pixels = CLIPImageProcessorPil.from_pretrained(scorer)(images, return_tensors="pt").pixel_values
    tokens = tokenizer(job.prompt, padding="max_length", max_length=24, return_tensors="pt").input_ids
    with torch.no_grad():
        of_images = model.get_image_features(pixels).pooler_output
        of_text = model.get_text_features(tokens).pooler_output
    expected = torch.cosine_similarity(of_images, of_text).tolist()
    assert [score for _, score in kept(made, job)] == pytest.approx(expected, abs=2e-3)


def test_a_head_scores_the_embedding_of_the_image(scorer: Path, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    layers = {
        "layers.0.weight": torch.randn(6, 48, generator=generator),
        "layers.0.bias": torch.randn(6, generator=generator),
        "layers.2.weight": torch.randn(1, 6, generator=generator),
    }
    save_file(layers, tmp_path / "head.safetensors")
    spec = scored_spec(scorer, head=tmp_path / "head.safetensors")
    job = a_contest("contest", BestOf(candidates=4, keep=3, at=(1.0,)))
    made = EngineHarness(spec, fresh=("tiny",)).run(job)
    pixels = CLIPImageProcessorPil.from_pretrained(scorer)(
        [made.images[job.id, index] for index in range(job.n)], return_tensors="pt"
    ).pixel_values
    with torch.no_grad():
        embedding = CLIPModel.from_pretrained(scorer).get_image_features(pixels).pooler_output
    value = torch.nn.functional.normalize(embedding, dim=-1)
    value = value @ layers["layers.0.weight"].T + layers["layers.0.bias"]
    expected = (value @ layers["layers.2.weight"].T).flatten().tolist()
    assert [score for _, score in kept(made, job)] == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize("family", ["sd", "sdxl", "sd3", "flux"])
def test_candidates_of_other_families_are_compared(
    family: str, tiny_model: Callable[[str], Path], scorer: Path
) -> None:
    job = a_contest("contest", BestOf(candidates=3, keep=1, at=(0.5,)), steps=4)
    made = EngineHarness(scored_spec(scorer, tiny_model(family))).run(job)
    assert made.finished[job.id].error is None
    scores = [score for _, score in kept(made, job)] + [one.score for one in made.finished[job.id].batching.dropped]
    assert len(set(scores)) == 3, "each predicted image has a score of its own"
    assert None not in scores


class CancelingRecorder(EventRecorder):
    """Cancels a job when its first candidates are dropped."""

    cancel: Callable[[], None] = staticmethod(lambda: None)

    def on_event(self, event: EngineEvent) -> None:
        super().on_event(event)
        if self.log and self.log[-1][0] == "dropped":
            self.cancel()


def test_a_job_is_canceled_while_its_candidates_run(scorer: Path) -> None:
    recorder = CancelingRecorder()
    harness = EngineHarness(scored_spec(scorer), recorder=recorder)
    recorder.cancel = lambda: harness.engine.cancel("contest")
    made = harness.run(a_contest("contest"), a_job("mate", prompt=PROMPT, steps=STEPS))
    assert made.finished["contest"].canceled
    assert made.finished["mate"].error is None
    assert not any(key == "contest" for key, _ in made.images)


def test_a_model_without_its_scorer_fails_the_job(scorer: Path) -> None:
    made = EngineHarness(a_spec(DEMO)).run(a_contest("contest"))
    error = made.finished["contest"].error
    assert error is not None
    assert (error.param, error.message) == (
        "best_of",
        "best_of: model 'tiny' cannot compare candidates: it has no scorer",
    )


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        ({"README.md": "none"}, "holds no CLIP model (no config.json)"),
        ({"config.json": '{"model_type": "blip"}'}, "is of type 'blip'; use a CLIP model"),
    ],
)
def test_another_model_is_no_scorer(files: dict[str, str], fault: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    made = EngineHarness(scored_spec(tmp_path), fresh=("tiny",)).run(a_contest("contest"))
    error = made.finished["contest"].error
    assert error is not None
    assert fault in error.message
