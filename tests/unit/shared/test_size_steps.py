"""Sides that a model in a folder can make, as far as its files say it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shared.config.partial_denoising import pipeline_class
from shared.config.size_steps import size_step, vae_scale


def test_a_folder_that_appears_later_is_read_then(tmp_path: Path) -> None:
    """Its file system can be mounted after the API has started."""
    folder = tmp_path / "model"
    assert (size_step(folder), vae_scale(str(folder)), pipeline_class(str(folder))) == (1, None, None)
    (folder / "vae").mkdir(parents=True)
    (folder / "vae/config.json").write_text(json.dumps({"block_out_channels": [8, 16, 32, 64]}))
    index = {"_class_name": "FluxPipeline", "transformer": ["diffusers", "FluxTransformer2DModel"]}
    (folder / "model_index.json").write_text(json.dumps(index))
    assert (size_step(folder), vae_scale(str(folder)), pipeline_class(str(folder))) == (16, 8, "FluxPipeline")


@pytest.mark.parametrize(
    ("pipeline", "vae", "step"),
    [
        ("LTXPipeline", {"patch_size": 4, "spatio_temporal_scaling": [True, True, True, False]}, 32),
        ("LTXLatentUpsamplePipeline", {"patch_size": 4, "spatio_temporal_scaling": [True, True, True, False]}, 64),
        ("LTX2LatentUpsamplePipeline", {"spatio_temporal_scaling": [True], "spatial_compression_ratio": 32}, 64),
    ],
)
def test_a_vae_of_patches_and_an_upscaler_make_larger_steps(
    tmp_path: Path, pipeline: str, vae: dict[str, Any], step: int
) -> None:
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae/config.json").write_text(json.dumps({"block_out_channels": [8, 16, 32, 64], **vae}))
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": pipeline}))
    assert size_step(tmp_path) == step


def test_an_upscaler_by_2_25_makes_twice_the_steps_of_its_vae(tmp_path: Path) -> None:
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae/config.json").write_text(json.dumps({"encoder_block_out_channels": [16, 128, 256, 512, 1024]}))
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "Kandinsky6SRPipeline"}))
    assert size_step(tmp_path) == 32
