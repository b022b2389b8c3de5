"""What a checkpoint belongs to is the same on all workers, and another for other weights and jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness.engine import a_job, a_spec

from shared.config.controls import ControlSpec
from shared.job_fields import Priority
from worker.engine.checkpoints.identity import job_digest, model_fingerprint


def a_folder(folder: Path, middle: bytes = b"m") -> Path:
    (folder / "unet").mkdir(parents=True)
    (folder / "model_index.json").write_text("{}")
    (folder / "unet/weights.safetensors").write_bytes(b"a" * 50_000 + middle + b"z" * 50_000)
    return folder


def test_a_model_has_its_fingerprint_in_any_folder(tmp_path: Path) -> None:
    one, other = a_folder(tmp_path / "one"), a_folder(tmp_path / "other")
    (other / ".cache").mkdir()
    (other / ".cache/lock").write_text("x")
    assert model_fingerprint(a_spec(one), one) == model_fingerprint(a_spec(other, max_batch=9), other)


def test_other_weights_and_dtypes_have_another_fingerprint(tmp_path: Path) -> None:
    one, other = a_folder(tmp_path / "one"), a_folder(tmp_path / "other", middle=b"n")
    prints = {model_fingerprint(a_spec(one), one), model_fingerprint(a_spec(other), other)}
    prints.add(model_fingerprint(a_spec(one, dtype="bfloat16"), one))
    (one / "vae.json").write_text("{}")
    prints.add(model_fingerprint(a_spec(one), one))
    assert len(prints) == 4


def test_a_control_net_counts_as_part_of_the_model(tmp_path: Path) -> None:
    folder, net, other = (a_folder(tmp_path / name, name.encode()) for name in ("model", "net", "other"))
    prints = {
        model_fingerprint(a_spec(folder, control=(ControlSpec(id="net", source=str(source)),)), folder)
        for source in (net, other)
    }
    assert len(prints) == 2


@pytest.mark.parametrize(
    ("fields", "same"),
    [
        ({"priority": Priority.BULK}, True),
        ({"created_at_ms": 5}, True),
        ({"time_limit_ms": 5000}, True),
        ({"previews": 3}, True),
        ({"seed": 4}, False),
        ({"prompt": "another"}, False),
        ({"steps": 9}, False),
        ({"id": "another"}, False),
        ({"tenant": "another"}, False),
        ({"scheduler": "DDIMScheduler"}, False),
    ],
)
def test_a_job_is_another_one_if_its_images_would_be(fields: dict[str, Any], same: bool) -> None:
    job = a_job("one", seed=3)
    assert (job_digest(job) == job_digest(job.model_copy(update=fields))) is same
