"""What a checkpoint belongs to: a model's weights and a job, by digests that are equal on all workers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch

from shared.config.model_spec import ModelSpec
from shared.job import Job
from worker.engine.checkpoints.checkpoint import Identity

# Fields of a job that change no step of its images; some can change while it is queued.
_WITHOUT_EFFECT = {
    *("schema_version", "created_at_ms", "time_limit_ms", "not_before_ms", "webhook", "output", "trace", "previews"),
    *("after", "on_parent_failure", "priority", "on_deadline", "output_quality", "embed_parameters", "mixed_fields"),
}
# Keys of a model that change what its steps compute; its weights are known by their files.
_WITH_EFFECT = {"dtype", "variant", "quantization", "layerwise_casting", "prompt_syntax"}

_SAMPLE_BYTES = 16 * 1024
_LIBRARIES = ("torch", "diffusers", "transformers")


def identity_of(model: str, job: Job, image: int, device: torch.device) -> Identity:
    """Return what a checkpoint of an image belongs to; `model` is the fingerprint of its model."""
    return Identity(model, job_digest(job), image, device.type, _versions())


def job_digest(job: Job) -> str:
    """Return a digest of what a job's images depend on, and of its id."""
    return hashlib.sha256(job.model_dump_json(exclude=_WITHOUT_EFFECT).encode()).hexdigest()


def model_fingerprint(spec: ModelSpec, folder: Path) -> str:
    """Return a digest of a model's files and of the keys that change what it computes.

    It reads the size, and the bytes at the beginning, the middle and the end of each file: other weights differ
    there, and the files of a large model are not read whole.
    """
    digest = hashlib.sha256(spec.model_dump_json(include=_WITH_EFFECT).encode())
    others = (spec.checkpoint, spec.vae, *(control.source for control in spec.control if control.is_folder))
    for root in (folder, *(Path(one) for one in others if one is not None)):
        for file in _files(root):
            size = file.stat().st_size
            digest.update(f"\n{file.relative_to(root).as_posix()} {size}\n".encode())
            for part in _samples(file, size):
                digest.update(part)
    return digest.hexdigest()


def _files(root: Path) -> Iterable[Path]:
    if root.is_file():
        return [root]
    paths = (path for path in root.rglob("*") if not any(part.startswith(".") for part in path.relative_to(root).parts))
    return sorted(path for path in paths if path.is_file())


def _samples(file: Path, size: int) -> Iterator[bytes]:
    """Yield bytes of a file; of one that cannot be read, such as another user's notes beside the weights, none."""
    with suppress(OSError), file.open("rb") as opened:
        for at in dict.fromkeys((0, max(0, size // 2 - _SAMPLE_BYTES // 2), max(0, size - _SAMPLE_BYTES))):
            opened.seek(at)
            yield opened.read(_SAMPLE_BYTES)


@cache
def _versions() -> str:
    return ", ".join(f"{name} {version(name)}" for name in _LIBRARIES)
