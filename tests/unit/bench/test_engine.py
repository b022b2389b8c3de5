"""The engine benchmark measures and saves its figures with their environment."""

import json
from pathlib import Path

import pytest
import torch

from bench.engine import comparison as engine
from bench.engine import decodes, masks, shapes


def test_a_small_shape_is_measured_and_saved(tmp_path: Path) -> None:
    saved = tmp_path / "figures.json"
    engine.main([*["--models", "sd", "--steps", "2", "--rows", "2", "--repeats", "1", "--json"], str(saved)])
    record = json.loads(saved.read_text())
    (result,) = record["results"]
    assert result["rows_per_forward"] == 2.0
    assert min(result["fused_ms"], result["pipeline_batch_ms"], result["one_by_one_ms"]) > 0
    assert {"hardware", "commit", "command", "torch", "threads"} <= set(record["about"])


@pytest.mark.parametrize(
    ("shape", "denoiser", "billions"), [("sd15", "unet", 0.86), ("sdxl", "unet", 2.57), ("sd3", "transformer", 2.03)]
)
def test_the_shapes_for_a_gpu_have_the_real_sizes(shape: str, denoiser: str, billions: float) -> None:
    """Parameters of the published checkpoints' denoisers."""
    with torch.device("meta"):
        pipeline = shapes.SHAPES[shape]()
    count = sum(parameter.numel() for parameter in getattr(pipeline, denoiser).parameters())
    assert count / 1e9 == pytest.approx(billions, abs=0.06)


def test_options_override_the_preset() -> None:
    options = engine.parse_options(["--gpu", "--device", "cpu", "--models", "sd", "--sides", "64"])
    assert (options.device, options.models, options.sides) == ("cpu", ["sd"], [64])
    assert (options.dtype, options.steps) == ("bfloat16", [20])


def test_the_gpu_preset_without_a_gpu_is_an_error() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(SystemExit, match="no CUDA device"):
        engine.main(["--gpu"])


def test_the_tax_of_masks_is_measured_and_saved(tmp_path: Path) -> None:
    saved = tmp_path / "figures.json"
    masks.main(["--sides", "64", "--repeats", "1", "--json", str(saved)])
    results = json.loads(saved.read_text())["results"]
    assert [result["lengths"] for result in results] == [list(lengths) for lengths in masks.LENGTHS]
    assert all(min(result["mask"], result["grouped"], result["equal_ms"]) > 0 for result in results)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux' peak of memory")
def test_the_memory_of_divided_decodes_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decodes, "SIDE", 128)
    saved = tmp_path / "figures.json"
    decodes.main(["--json", str(saved)])
    results = {result["keys"]: result for result in json.loads(saved.read_text())["results"]}
    assert results["both"]["peak_mib"] < results["neither"]["peak_mib"]
