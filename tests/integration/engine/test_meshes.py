"""Meshes of batched jobs are those of hy3dgen's own pipeline, from a folder as Tencent's repositories have it."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from harness.engine import DIFFUSERS_AND_NUMPY, EngineHarness, EventRecorder, a_spec
from harness.meshes import difference, mesh_job, plain_mesh, spec_of
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny.meshes import needs_hy3dgen, save_mesh_model

from shared.errors import ModelUnavailable
from shared.job import Job
from worker.engine.outputs import Mesh
from worker.engine.protocol import EngineRequest, InputFiles
from worker.engine.weights.missing_packages import missing_package
from worker.engine.weights.shape_classes import shape_classes

pytestmark = [pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY), needs_hy3dgen]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mesh_model(tmp_path_factory.mktemp("mesh"))


def run(folder: Path, *jobs: Job, **fields: Any) -> EventRecorder:
    return EngineHarness(spec_of(folder, **fields)).run(*jobs)


def error_of(folder: Path, job: Job, image: bytes | None = None, **fields: Any) -> Any:
    harness = EngineHarness(spec_of(folder, **fields))
    harness.submit(job, image=image)
    with harness.started():
        harness.recorder.wait_for([job.id])
    return harness.recorder.finished[job.id].error


def assert_equal(one: Mesh, other: Mesh, within: float = 1e-4) -> None:
    assert difference(one, other) <= within


@pytest.mark.parametrize("variant", [{}, {"turbo": True}, {"views": True}])
def test_batched_jobs_with_other_images_and_steps_get_the_meshes_of_hy3dgen(
    variant: dict[str, bool], tmp_path: Path
) -> None:
    folder = save_mesh_model(tmp_path / "model", **variant)
    views = 3 if variant.get("views") else 1
    jobs = [mesh_job(f"job-{steps}", views, seed=steps, steps=steps, guidance_scale=steps / 2) for steps in (3, 4, 6)]
    recorder = run(folder, *jobs)
    for job in jobs:
        assert recorder.finished[job.id].error is None
        assert recorder.finished[job.id].batching.max_jobs == 3
        assert_equal(recorder.meshes[job.id, 0], plain_mesh(folder, job))
    assert recorder.rows[:3] == [3, 3, 3]


def test_chunks_of_several_jobs_share_forwards(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from worker.engine.fusion.module_proxy import SharedMethod

    rows: list[int] = []
    run_method = SharedMethod.run

    def noting(self: SharedMethod, *args: Any, **kwargs: Any) -> Any:
        if self.component == "geo_decoder":
            rows.append(len(kwargs["queries"]))
        return run_method(self, *args, **kwargs)

    harness = EngineHarness(spec_of(folder))
    with harness.started():
        harness.submit(mesh_job("load"))
        harness.recorder.wait_for(["load"])
        monkeypatch.setattr(SharedMethod, "run", noting)
        harness.submit(*(mesh_job(f"job-{seed}", seed=seed) for seed in range(3)))
        harness.recorder.wait_for([f"job-{seed}" for seed in range(3)])
    assert rows == [3, 3]  # 9,261 points in chunks of 8,000


def test_a_reproducible_mesh_does_not_depend_on_the_batch(folder: Path) -> None:
    jobs = [mesh_job(f"job-{seed}", seed=seed, reproducible=True) for seed in range(3)]
    among = run(folder, *jobs)
    solo = run(folder, jobs[0])
    assert among.finished["job-0"].batching.max_jobs == 2
    assert_equal(among.meshes["job-0", 0], solo.meshes["job-0", 0], within=0.0)


def test_each_mesh_of_a_job_has_its_own_seed(folder: Path) -> None:
    recorder = run(folder, mesh_job("two", seed=5, n=2), mesh_job("six", seed=6))
    first, second = (recorder.meshes["two", at] for at in (0, 1))
    assert first.vertices.shape != second.vertices.shape
    image_of_two = mesh_job("two", seed=5)
    assert_equal(first, plain_mesh(folder, image_of_two))


def test_chunks_of_the_volume_do_not_change_the_mesh(folder: Path) -> None:
    few = mesh_job("few", seed=1, extra={"octree_resolution": 20, "num_chunks": 1000})
    recorder = run(folder, few, mesh_job("one", seed=1, extra={"octree_resolution": 20, "num_chunks": 100_000}))
    assert_equal(recorder.meshes["few", 0], recorder.meshes["one", 0])


def test_the_level_moves_the_surface(folder: Path) -> None:
    inputs = {"octree_resolution": 20}
    jobs = [mesh_job(name, seed=1, extra={**inputs, "mc_level": level}) for name, level in (("low", -0.1), ("up", 0.1))]
    recorder = run(folder, *jobs)
    assert recorder.meshes["low", 0].vertices.shape != recorder.meshes["up", 0].vertices.shape


def test_a_volume_without_a_surface_fails_its_job_only(folder: Path) -> None:
    nothing = mesh_job("nothing", extra={"octree_resolution": 16, "mc_level": 10.0})
    recorder = run(folder, nothing, mesh_job("other"))
    error = recorder.finished["nothing"].error
    assert error is not None
    assert "none crosses mc_level 10" in error.message
    assert recorder.finished["other"].error is None


def test_values_that_are_not_finite_fail_the_job(tmp_path: Path) -> None:
    broken = save_mesh_model(tmp_path / "model")
    weights = load_file(broken / "model.fp16.safetensors")
    weights["vae.geo_decoder.output_proj.bias"] = torch.full((1,), torch.nan)
    save_file(weights, broken / "model.fp16.safetensors")
    assert error_of(broken, mesh_job("job")).code == "non_finite_latents"


def test_a_mesh_with_too_many_vertices_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.engine.pipelines.shape_pipeline.MAX_VERTICES", 100)
    error = error_of(folder, mesh_job("job"))
    assert error.param == "extra.octree_resolution"
    assert "lower octree_resolution" in error.message


@pytest.mark.parametrize(
    ("name", "value"), [("octree_resolution", 513), ("octree_resolution", 8), ("num_chunks", 10), ("mc_level", "high")]
)
def test_inputs_beyond_their_bounds_are_refused(folder: Path, name: str, value: Any) -> None:
    assert error_of(folder, mesh_job("job", extra={name: value})).param == f"extra.{name}"


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (Image.new("RGBA", (40, 40)), "all of it is transparent"),
        (Image.new("RGB", (40, 1)), "input image is empty"),
        (Image.new("RGB", (1000, 2)), "too narrow"),
    ],
)
def test_an_image_that_shows_no_object_is_refused(folder: Path, image: Image.Image, reason: str) -> None:
    error = error_of(folder, mesh_job("job"), png(image))
    assert (error.code, error.param) == ("invalid_input_image", "image")
    assert reason in error.message


def test_several_images_are_refused_by_a_model_of_one_view(folder: Path) -> None:
    recorder = run(folder, mesh_job("job", 2), limits=a_spec(folder).limits.model_copy(update={"max_input_images": 4}))
    error = recorder.finished["job"].error
    assert error is not None
    assert "it takes 1 of them, not 2" in error.message


def test_the_alpha_channel_separates_the_object(folder: Path) -> None:
    """Of two images with the same colours, only the object counts."""
    whole = Image.radial_gradient("L").resize((80, 80)).convert("RGBA")
    part = whole.copy()
    part.putalpha(Image.radial_gradient("L").resize((80, 80)).point(lambda value: 255 if value < 100 else 0))
    recorder = EventRecorder()
    harness = EngineHarness(spec_of(folder), recorder=recorder)
    for name, image in (("whole", whole), ("part", part)):
        job = mesh_job(name, seed=1)
        harness.engine.submit(EngineRequest(name, job, harness.specs["tiny"], InputFiles(images=(png(image),))))
    with harness.started():
        recorder.wait_for(["whole", "part"])
    assert recorder.meshes["whole", 0].vertices.shape != recorder.meshes["part", 0].vertices.shape


def test_a_missing_package_is_named_with_its_remedy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    shape_classes.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "hy3dgen" else found(name))
    monkeypatch.setattr("worker.engine.weights.missing_packages.distribution", lambda _name: None)
    try:
        fault = missing_package(spec_of(folder), folder)
    finally:
        shape_classes.cache_clear()
    remedy = "pip install --no-deps hy3dgen (docs/models/sounds-and-meshes.md)"
    assert fault == f"it needs hy3dgen, which is not installed; {remedy}"


def changed(**changes: Any) -> Callable[[dict[str, Any]], None]:
    """A change of a configuration: a value by its path."""

    def change(config: dict[str, Any]) -> None:
        for path, value in changes.items():
            *parents, last = path.split("__")
            table = config
            for name in parents:
                table = table[name]
            table[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (changed(model__target="os.system"), "names 'os.system' as its model"),
        (changed(scheduler__target="diffusers.DDIMScheduler"), "no class of hy3dgen"),
        (changed(model__params__ckpt_path="/tmp/pickle.ckpt"), "parameter 'ckpt_path', which is not read"),
        (
            changed(conditioner__params__main_image_encoder={"type": "DinoImageEncoder", "kwargs": {"version": "a/b"}}),
            "has no config of its own",
        ),
        (changed(model__params__depth=2), "has no weights for"),
        (changed(model__params__depth=0), "has no place for"),
        (changed(vae=None), "names None as its vae"),
    ],
)
def test_a_configuration_that_would_run_or_read_anything_else_is_refused(
    change: Callable[[dict[str, Any]], None], reason: str, tmp_path: Path
) -> None:
    broken = save_mesh_model(tmp_path / "model")
    config = yaml.safe_load((broken / "config.yaml").read_text())
    change(config)
    (broken / "config.yaml").write_text(yaml.safe_dump(config))
    error = error_of(broken, mesh_job("job"))
    assert isinstance(error, ModelUnavailable)
    assert reason in error.message


def test_yaml_that_names_python_objects_is_refused(tmp_path: Path) -> None:
    broken = save_mesh_model(tmp_path / "model")
    mark = tmp_path / "mark"
    (broken / "config.yaml").write_text(f"model: !!python/object/apply:os.mkdir ['{mark}']\n")
    assert isinstance(error_of(broken, mesh_job("job")), ModelUnavailable)
    assert not mark.exists()


def test_a_pickle_is_not_read(tmp_path: Path) -> None:
    broken = save_mesh_model(tmp_path / "model")
    (broken / "model.fp16.safetensors").rename(broken / "model.fp16.ckpt")
    error = error_of(broken, mesh_job("job"))
    assert isinstance(error, ModelUnavailable)
    assert "it has no model.fp16.safetensors" in error.message
