"""Attention backends: fused images equal solo ones, lengths that a backend cannot mask share no forward, and a backend
that does not run is refused with those that do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers.models import attention_dispatch
from harness.engine import DIFFUSERS_AND_NUMPY, a_job, a_spec
from parity.against_solo import mixed_jobs, run_batch, run_fused_and_solo

from shared.errors import ModelUnavailable
from worker.engine.pipelines.loading import load
from worker.engine.weights.attention import available_backends

pytestmark = [
    pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.usefixtures("shared_models"),
]
CPU = torch.device("cpu")
WITHOUT_MASKS = "_native_flash"


@pytest.fixture
def qwen(tiny_model: Callable[[str], Path]) -> Path:
    """A model that pads prompts, and masks them where their lengths differ."""
    return tiny_model("qwen-image")


@pytest.mark.parametrize("attention", [pytest.param("_native_math", marks=pytest.mark.slow), WITHOUT_MASKS])
def test_each_job_of_a_mixed_batch_gets_the_same_image_as_solo(attention: str, qwen: Path) -> None:
    fused = run_fused_and_solo(a_spec(qwen, attention=attention), mixed_jobs())
    for key, image in run_batch(a_spec(qwen), mixed_jobs()).images.items():
        assert np.abs(fused.images[key] - image).max() <= 1e-4


def test_a_backend_without_masks_fuses_prompts_of_equal_length(qwen: Path) -> None:
    words = ("a dog", "a cat", "a large red dog", "a small red cat")
    jobs = [a_job(prompt, prompt=prompt, negative_prompt=prompt, steps=3) for prompt in words]
    masked, plain = (run_batch(a_spec(qwen, attention=name), jobs).rows for name in ("native", WITHOUT_MASKS))
    assert Counter(masked).most_common(1)[0][0] == 2 * max(plain)


def test_other_models_keep_their_backend(qwen: Path) -> None:
    before = attention_dispatch._AttentionBackendRegistry._active_backend
    load(a_spec(qwen, attention="_native_math"), qwen, CPU)
    assert attention_dispatch._AttentionBackendRegistry._active_backend is before


@pytest.mark.parametrize(
    ("attention", "reason"),
    [
        ("nativ", "diffusers has no such backend"),
        ("sage", "sageattention"),
        ("flash_hub", "workers run no code from the hub"),
    ],
)
def test_a_backend_that_does_not_run_is_refused_with_those_that_do(attention: str, reason: str, qwen: Path) -> None:
    with pytest.raises(ModelUnavailable) as caught:
        load(a_spec(qwen, attention=attention), qwen, CPU)
    assert f'attention = "{attention}" does not run here' in caught.value.message
    assert reason in caught.value.message
    assert "; available: " in caught.value.message
    assert caught.value.message.endswith(", ".join(available_backends(CPU, torch.float32)))


def test_a_denoiser_without_backends_is_refused(tiny_models: Path) -> None:
    with pytest.raises(ModelUnavailable, match="the layers of UNet2DConditionModel take no backend; remove the key"):
        load(a_spec(tiny_models / "sd", attention="native"), tiny_models / "sd", CPU)
