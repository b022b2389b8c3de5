"""Whether models fit: what `fusequeue doctor` reports about their weights."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from harness.engine import a_spec
from harness.http_server import ROOT
from tiny import registry

from shared.config.weight_formats import Quantization
from shared.runtime.python_command import python_command
from shared.tasks import Task
from worker.engine.checks.memory_fit import check_model, check_packages, verdict_of
from worker.engine.weights.requirements import model_bytes

GIB = 2**30


@pytest.mark.parametrize(
    ("gib", "offload", "verdict", "remedy"),
    [
        (23.8, "none", "ok", ""),
        (60.0, "none", "warning", "quantization"),
        (81.0, "none", "failed", 'layerwise_casting (docs/models/speed-and-memory.md) or offload = "group"'),
        (81.0, "group", "ok", ""),
    ],
)
def test_weights_are_compared_with_the_memory(gib: float, offload: str, verdict: str, remedy: str) -> None:
    found = verdict_of(a_spec(Path("/none"), offload=offload), int(gib * GIB), 80 * GIB)
    assert found.verdict == verdict
    assert remedy in found.remedy
    assert bool(found.remedy) is (verdict != "ok")


def test_a_quantized_model_is_counted_in_its_format(tiny_models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.engine.weights.requirements.is_installed", lambda _package: True)
    folder = tiny_models / "flux"
    plain = a_spec(folder)
    small = a_spec(folder, quantization=Quantization(denoiser="torchao-int8"))
    between = (model_bytes(plain, folder) + model_bytes(small, folder)) // 2
    assert check_model(plain, "cpu", between).verdict == "failed"
    assert check_model(small, "cpu", between).verdict in ("ok", "warning")


def test_a_missing_package_fails_the_check(tiny_models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.engine.weights.requirements.is_installed", lambda _package: False)
    spec = a_spec(tiny_models / "flux", quantization=Quantization(denoiser="torchao-int8"))
    found = check_model(spec, "cpu", 80 * GIB)
    assert (found.verdict, found.remedy) == ("failed", "pip install 'fusequeue-server[quantization]'")


def test_a_refiner_has_all_it_needs(tmp_path: Path) -> None:
    """Its folder has neither a first text encoder nor its tokenizer."""
    folder = registry.save_tiny("sdxl-refiner", tmp_path)
    spec = a_spec(folder, tasks=(Task.IMAGE_TO_IMAGE, Task.INPAINT))
    assert not (folder / "text_encoder").exists()
    assert check_model(spec, "cpu", GIB).verdict == "ok"
    assert check_packages(spec, folder).verdict == "ok"


@pytest.mark.parametrize("source", ["/none/at/all", "./none", "none"])
def test_a_model_with_files_elsewhere_is_not_judged(source: str) -> None:
    """Nor does one whose source is a mistake end the check of the others."""
    spec = a_spec(Path("/none/at/all")).model_copy(update={"source": source})
    assert check_model(spec, "cpu", GIB).verdict == "ok"


def test_the_doctor_s_process_reports_the_device_and_each_model() -> None:
    environment = {**os.environ, "FUSEQUEUE_DEVICE": "cpu", "FUSEQUEUE_MODELS": str(ROOT / "models.toml")}
    command = python_command("worker.engine.checks.memory_fit")
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110, check=True)
    found = {line["name"]: line["verdict"] for line in map(json.loads, done.stdout.splitlines())}
    assert found == {"device": "warning", "memory for demo": "ok", "packages for demo": "ok"}
