"""Sides that a model in a folder can make, as far as its files say it."""

from __future__ import annotations

import json
from pathlib import Path

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
