"""Jobs that make meshes, and those of hy3dgen's own pipeline."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from harness.engine import a_job, a_spec, input_files
from shared.job import Job
from shared.tasks import OutputFormat, Task
from worker.engine.outputs import Mesh
from worker.engine.weights.shape_classes import shape_classes

VIEWS = ("front", "left", "back", "right")


def spec_of(folder: Path, **fields: Any) -> Any:
    return a_spec(folder, tasks=(Task.IMAGE_TO_MESH,), variant="fp16", mixed_fields=(), **fields)


def mesh_job(name: str, image_count: int = 1, extra: dict[str, Any] | None = None, **fields: Any) -> Job:
    inputs = {"octree_resolution": 20} if extra is None else extra
    values = {"prompt": "", "task": Task.IMAGE_TO_MESH, "output_format": OutputFormat.GLB, "extra": inputs}
    return a_job(name, image_count, **(values | fields))


def plain_mesh(folder: Path, job: Job) -> Mesh:
    """The mesh of hy3dgen's own pipeline and loader."""
    pipeline = shape_classes().pipeline.from_single_file(
        str(folder / "model.fp16.ckpt"),
        str(folder / "config.yaml"),
        device="cpu",
        dtype=torch.float32,
        use_safetensors=True,
    )
    images = [Image.open(io.BytesIO(data)).convert("RGBA") for data in input_files(job).images]
    takes_views = getattr(pipeline.image_processor, "return_view_idx", False)
    (made,) = pipeline(
        image=dict(zip(VIEWS, images, strict=False)) if takes_views else images[0],
        num_inference_steps=job.steps,
        guidance_scale=job.guidance_scale,
        generator=torch.Generator("cpu").manual_seed(job.seed),
        enable_pbar=False,
        **(job.extra or {}),
    )
    return Mesh(np.asarray(made.vertices, np.float32), np.asarray(made.faces, np.uint32))


def difference(one: Mesh, other: Mesh) -> float:
    """Return the largest difference of two meshes' vertices; their faces must be the same."""
    assert one.vertices.shape == other.vertices.shape
    assert np.array_equal(one.faces, other.faces)
    return float(np.abs(one.vertices - other.vertices).max())
