"""The engine's benchmark measures what it says, and keeps it with all that it takes to measure it again."""

import json
from pathlib import Path

import pytest
import torch

from bench import engine, shapes


def test_a_small_shape_is_measured_and_kept(tmp_path: Path) -> None:
    kept = tmp_path / "figures.json"
    engine.main([*["--models", "sd", "--steps", "2", "--rows", "2", "--repeats", "1", "--json"], str(kept)])
    told = json.loads(kept.read_text())
    (result,) = told["results"]
    assert result["rows_a_forward"] == 2.0
    assert min(result["fused_ms"], result["own_batch_ms"], result["one_by_one_ms"]) > 0
    assert {"hardware", "commit", "command", "torch", "threads"} <= set(told["about"])


@pytest.mark.parametrize(
    ("shape", "denoiser", "billions"), [("sd15", "unet", 0.86), ("sdxl", "unet", 2.57), ("sd3", "transformer", 2.03)]
)
def test_the_shapes_for_a_gpu_have_the_real_sizes(shape: str, denoiser: str, billions: float) -> None:
    """Parameters of the published checkpoints' denoisers."""
    with torch.device("meta"):
        pipeline = shapes.SHAPES[shape]()
    count = sum(parameter.numel() for parameter in getattr(pipeline, denoiser).parameters())
    assert count / 1e9 == pytest.approx(billions, abs=0.06)


def test_a_preset_gives_way_to_what_the_command_line_says() -> None:
    chosen = engine.arguments(["--gpu", "--device", "cpu", "--models", "sd", "--sides", "64"])
    assert (chosen.device, chosen.models, chosen.sides) == ("cpu", ["sd"], [64])
    assert (chosen.dtype, chosen.steps) == ("bfloat16", [20])


def test_without_a_gpu_the_gpu_form_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit, match="no CUDA device"):
        engine.main(["--gpu"])
