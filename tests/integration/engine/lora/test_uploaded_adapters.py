"""Uploaded adapters in the engine: files that come with their jobs, per row of one fused forward."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from harness.adapters import PeftReference, adapters_of, assert_all_like_solo, eight_jobs, load_pipeline, mixable
from harness.engine import DIFFUSERS_AND_NUMPY, EngineHarness, a_job, a_spec
from harness.waiting import wait_until
from parity.running import as_floats
from safetensors.torch import save_file
from tiny import lora

from shared.config.adapters import AdapterSpec
from shared.errors import AdapterUnavailable
from worker.engine.models import adapter_loader
from worker.engine.protocol import EngineRequest

pytestmark = [
    pytest.mark.filterwarnings(
        DIFFUSERS_AND_NUMPY, "ignore:Already found a `peft_config`", "ignore:.*number of unique parameters mappings"
    ),
    pytest.mark.usefixtures("shared_models"),
]


@pytest.fixture(scope="module")
def files(tiny_models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    pipeline, target = load_pipeline(tiny_models / "sd"), tmp_path_factory.mktemp("uploaded")
    return {
        name: lora.save(pipeline, target / name / "adapter.safetensors", seed, ("unet",))
        for seed, name in enumerate(("ink", "oil", "neon"), 1)
    }


@pytest.fixture(scope="module")
def reference(tiny_models: Path, files: dict[str, Path]) -> PeftReference:
    return PeftReference(tiny_models / "sd", files)


@pytest.mark.parametrize("budget_bytes", [1, 2**30], ids=["none is kept", "all are kept"])
def test_rows_with_different_uploaded_adapters_equal_solo_runs(
    budget_bytes: int, tiny_models: Path, files: dict[str, Path], reference: PeftReference
) -> None:
    """Each job brings its own files; without memory for unused ones they are loaded again for each job."""
    spec, jobs = a_spec(tiny_models / "sd"), eight_jobs()
    harness = EngineHarness(spec, adapter_memory_bytes=budget_bytes)
    specs = {name: AdapterSpec(id=name, source=str(file)) for name, file in files.items()}
    requests = [EngineRequest(job.id, job, spec, adapters=tuple(specs[one.id] for one in job.adapters)) for job in jobs]
    with as_floats(), harness.started():
        harness.engine.submit(*requests)
        harness.recorder.wait_for([job.id for job in jobs])
        assert_all_like_solo(harness.recorder, reference, jobs)
    assert max(harness.recorder.rows) > 1, "nothing was fused"


def test_a_file_that_does_not_fit_fails_only_its_job(tiny_models: Path, tmp_path: Path) -> None:
    """So does one that is gone; the message has no path of this machine but the file's name."""
    spec = a_spec(tiny_models / "sd")
    other = load_pipeline(tiny_models / "flux")
    foreign = lora.save(other, tmp_path / "foreign.safetensors", 1)
    wide, unet = tmp_path / "wide.safetensors", load_pipeline(tiny_models / "sd").unet
    save_file({f"unet.{name}": one for name, one in lora.weights(unet, 1, lora.attention, 513).items()}, wide)
    uploaded = {"foreign": foreign, "gone": tmp_path / "gone.safetensors", "wide": wide}
    jobs = [mixable(a_job(name, adapters=adapters_of((name, 1.0)))) for name in uploaded]
    harness = EngineHarness(spec)
    with harness.started():
        adapters = [AdapterSpec(id=name, source=str(file)) for name, file in uploaded.items()]
        harness.engine.submit(
            EngineRequest("plain", mixable(a_job("plain")), spec),
            *(EngineRequest(job.id, job, spec, adapters=(one,)) for job, one in zip(jobs, adapters, strict=True)),
        )
        harness.recorder.wait_for(["plain", *uploaded])
    assert harness.recorder.finished["plain"].error is None
    assert "at most 512" in str(harness.recorder.finished["wide"].error)
    for name in uploaded:
        error = harness.recorder.finished[name].error
        assert isinstance(error, AdapterUnavailable), name
        assert error.param == "adapters"


def test_a_file_that_left_with_its_canceled_job_is_read_from_that_of_the_next_job(
    tiny_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both jobs have the same adapter, each with a file of its own; the first one is gone when it is to be read."""
    spec, reads = a_spec(tiny_models / "sd"), threading.Event()
    file = lora.save(load_pipeline(tiny_models / "sd"), tmp_path / "later.safetensors", 1, ("unet",))
    changes_for = adapter_loader.changes_for

    def waits(*args: Any) -> Any:
        assert reads.wait(60)
        return changes_for(*args)

    monkeypatch.setattr(adapter_loader, "changes_for", waits)
    harness = EngineHarness(spec)
    with harness.started() as engine:
        engine.warm_up()
        for name, path in (("canceled", tmp_path / "gone.safetensors"), ("next", file)):
            job = mixable(a_job(name, adapters=adapters_of(("ink", 1.0))))
            harness.engine.submit(EngineRequest(name, job, spec, adapters=(AdapterSpec(id="ink", source=str(path)),)))
        wait_until(lambda: ("loading", "next") in harness.recorder.log, "both jobs wait", 60)
        harness.engine.cancel("canceled")
        harness.recorder.wait_for(["canceled"])
        reads.set()
        harness.recorder.wait_for(["next"])
    assert harness.recorder.finished["next"].error is None
