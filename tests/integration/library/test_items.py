"""What items can be: images, numbers and prompts in any form, each fault that of its item."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.engine import an_audio_file
from harness.http_server import ROOT
from PIL import Image

from library import Engine
from library.catalogs import catalog_of
from library.requests import job_of
from shared.config.catalog import Catalog
from shared.config.model_spec import ModelSpec
from shared.config.settings import Settings
from shared.errors import InvalidRequest
from shared.job_fields import MAX_DURATION_S
from shared.tasks import Task

CIRCLE = "a red circle on a blue ground, left"
FIELDS: dict[str, Any] = {"width": 64, "height": 64, "steps": 2, "seed": 7}
TONE = an_audio_file()


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(ROOT / "demo" / "model", max_batch=4, device="cpu") as started:
        yield started


@pytest.mark.parametrize(
    ("item", "param"),
    [
        (None, "prompt"),
        (b"a cat", "prompt"),
        (7, "prompt"),
        ({"prompt": CIRCLE, "image": np.zeros((8, 8, 3))}, "image"),
        ({"prompt": CIRCLE, "image": np.zeros((8, 8, 5), np.uint8)}, "image"),
        ({"prompt": CIRCLE, "image": "a\0b"}, "image"),
        ({"prompt": CIRCLE, "images": Image.new("RGB", (8, 8))}, "images"),
        ({"prompt": CIRCLE, "images": np.zeros((2, 8, 8, 3), np.uint8)}, "images"),
        ({"prompt": CIRCLE, "images": "a.png"}, "images"),
        ({"prompt": CIRCLE, "images": 3}, "images"),
        ({"prompt": CIRCLE, "controls": 5}, "controls"),
        ({"prompt": CIRCLE, "image": TONE}, "image"),
        ({"prompt": CIRCLE, "audio": TONE}, "audio"),
        ({"prompt": CIRCLE, "audio": np.zeros(8)}, "audio"),
    ],
)
def test_an_item_of_another_kind_fails_alone(engine: Engine, item: Any, param: str) -> None:
    first, second, third = sorted(engine.stream([CIRCLE, item, CIRCLE], **FIELDS), key=lambda result: result.index)
    assert (first.error, third.error) == (None, None)
    assert isinstance(second.error, InvalidRequest)
    assert second.error.param == param


@pytest.mark.parametrize("mode", ["1", "CMYK", "YCbCr", "HSV", "LAB", "F", "I;16", "PA", "RGBa", "La"])
def test_an_image_can_have_any_mode(engine: Engine, mode: str) -> None:
    (result,) = engine.stream([CIRCLE], image=Image.new(mode, (64, 64)), strength=0.5, **FIELDS)
    assert (result.error, result.images[0].size) == (None, (64, 64))


def test_numbers_of_numpy_are_those_of_python(engine: Engine) -> None:
    fields = {"seed": np.int64(7), "steps": np.int32(3), "guidance_scale": np.float32(1.0), "reproducible": np.True_}
    (result,) = engine.stream([CIRCLE], n=np.int8(2), **{**FIELDS, **fields})
    assert (result.error, result.job.seed, result.job.steps, len(result.images)) == (None, 7, 3, 2)


def test_a_folder_of_a_model_of_sounds_has_their_longest_length(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableAudioPipeline"}')
    (spec,) = catalog_of([tmp_path], tmp_path / "none.toml", {})
    assert spec.limits.max_duration_s == MAX_DURATION_S


@pytest.mark.parametrize("is_path", [False, True])
def test_a_sound_is_a_path_or_bytes(is_path: bool, tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(TONE)
    spec = ModelSpec(id="m", source="org/m", tasks=(Task.AUDIO_TO_AUDIO,), limits={"max_duration_s": 9})
    fields = {"model": "m", "prompt": "a flute", "audio": tmp_path / "a.wav" if is_path else TONE}
    job, files = job_of(fields, Catalog((spec,)), Settings())
    assert (files.audio, job.audio.content_type) == (TONE, "audio/wav")
    assert job.duration_s == job.audio.duration_s
