"""Arguments of some pipelines: jobs with and without them share forwards, and get the images of plain calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from harness.engine import DIFFUSERS_AND_NUMPY, EngineHarness, a_job, a_spec
from parity.running import TOLERANCE, as_floats, compare, plain_results

pytestmark = [pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY), pytest.mark.usefixtures("shared_models")]

FIELDS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "sd": {"skipped": {"clip_skip": 1}, "rescaled": {"guidance_rescale": 0.7}},
    "sdxl": {
        "skipped": {"clip_skip": 1},
        "rescaled": {"guidance_rescale": 0.7},
        "two": {"prompt_2": "a cat in the rain"},
        "ended": {"denoising_end": 0.6},
    },
    "flux": {
        "two": {"prompt_2": "a cat in the rain"},
        "guided": {"negative_prompt": "rain, snow", "true_cfg_scale": 4.0},
        "short": {"max_sequence_length": 8},
    },
    "qwen-image": {"guided": {"negative_prompt": "rain", "true_cfg_scale": 2.0}},
}
OTHER_SHAPES = ("short",)  # of the prompt: their jobs have forwards of their own


@pytest.mark.parametrize("tiny", FIELDS)
def test_a_job_with_them_gets_the_image_of_the_plain_call(tiny: str, tiny_model: Callable[[str], Path]) -> None:
    source, common = tiny_model(tiny), {"prompt": "a dog on a hill", "steps": 4, "guidance_scale": 9.0, "seed": 5}
    jobs = [a_job("plain", **common), *(a_job(name, **common, **fields) for name, fields in FIELDS[tiny].items())]
    with as_floats():
        recorder = EngineHarness(a_spec(source)).run(*jobs)
        errors = {job.id: error for job in jobs if (error := recorder.finished[job.id].error) is not None}
        assert errors == {}
        assert compare(recorder, plain_results(source, jobs)) <= TOLERANCE  # and no two are alike
    assert recorder.rows[0] == sum(job.id not in OTHER_SHAPES for job in jobs)


def test_a_pipeline_without_them_warns_about_each(tiny_model: Callable[[str], Path]) -> None:
    fields = {"prompt_2": "a cat", "clip_skip": 1, "max_sequence_length": 8, "guidance_rescale": 0.5}
    recorder = EngineHarness(a_spec(tiny_model("sd"))).run(a_job("job", **fields))
    assert [warning.param for warning in recorder.finished["job"].warnings] == ["prompt_2", "max_sequence_length"]


@pytest.mark.parametrize(("scale", "warned"), [(None, ["negative_prompt"]), (1.0, ["negative_prompt"]), (2.0, [])])
def test_a_negative_prompt_counts_with_true_guidance(
    tiny_model: Callable[[str], Path], scale: float | None, warned: list[str]
) -> None:
    job = a_job("job", steps=2, negative_prompt="rain", true_cfg_scale=scale)
    without = a_job("without", steps=2, true_cfg_scale=scale)
    recorder = EngineHarness(a_spec(tiny_model("flux"))).run(job, without)
    assert [warning.param for warning in recorder.finished["job"].warnings] == warned
    assert [one.param for one in recorder.finished["without"].warnings] == ([] if warned else ["true_cfg_scale"])
