"""Cameras of models that follow one (SANA-WM): the path that a job gives in `extra`, and one for jobs without."""

import inspect
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.errors import UnusableInput
from shared.job import Job

_CAMERA = frozenset({"c2w", "action", "intrinsics"})
_MOST_POSES = 10_000  # of an action: a worker makes a matrix for each
_ACTION = re.compile(r"(?:none|[wasdijkl]+)-([0-9]{1,5})", re.IGNORECASE)


def camera_arguments(job: Job, accepted: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """Return what a call needs and the job leaves out: a camera that stands still and sees 90 degrees of the width.

    Raises `UnusableInput` for a path that does not have a pose for each frame of the job.
    """
    if not accepted.keys() >= _CAMERA:
        return {}
    given: dict[str, Any] = {
        name: value for name, value in (job.extra or {}).items() if name in _CAMERA and value is not None
    }
    if "c2w" in given and "action" in given:
        raise _fault("c2w", "give either c2w or action, not both")
    if "c2w" in given:
        _check_poses(_numbers(given["c2w"], "c2w"), job)
    if "action" in given:
        _check_action(str(given["action"]), job)
    if "intrinsics" in given:
        lens = _numbers(given["intrinsics"], "intrinsics")
        _check_lens(lens, job)
        given["intrinsics"] = _on_the_result(lens, job)
    path = {} if "c2w" in given else {"action": f"none-{max(1, job.frames - 1)}"}
    half, middle = job.width / 2, job.height / 2
    return {**path, "intrinsics": [half, half, half, middle], **given}


def _numbers(value: Any, name: str) -> npt.NDArray[np.float32]:
    try:
        return np.asarray(value, np.float32)
    except (TypeError, ValueError):
        raise _fault(name, "its lists must be of the same length") from None


def _check_poses(poses: npt.NDArray[np.float32], job: Job) -> None:
    if poses.ndim != 3 or poses.shape[1:] != (4, 4):
        raise _fault("c2w", "it must be a list of matrices of 4 x 4 numbers")
    _check_count("c2w", len(poses), job)


def _check_action(action: str, job: Job) -> None:
    steps = [_ACTION.fullmatch("".join(step.split())) for step in action.split(",")]
    counts = [0 if step is None else int(step[1]) for step in steps]
    if 0 in counts or sum(counts) > _MOST_POSES:
        raise _fault("action", f'it must be like "w-80,jw-40", with at most {_MOST_POSES} steps in all')
    _check_count("action", sum(counts) + 1, job)


def _check_lens(lens: npt.NDArray[np.float32], job: Job) -> None:
    if lens.shape[-1:] != (4,) or lens.ndim > 2 or not bool((lens[..., :2] > 0).all()):
        raise _fault("intrinsics", "it must be fx, fy, cx, cy, or a list of these for each frame")
    if lens.ndim == 2:
        _check_count("intrinsics", len(lens), job)


def _on_the_result(lens: npt.NDArray[np.float32], job: Job) -> npt.NDArray[np.float32]:
    """Return fx, fy, cx, cy in pixels of the result: those of a job are of its image, which is cropped to that."""
    image = job.images[0]
    scale = max(job.width / image.width, job.height / image.height)
    left, top = (image.width * scale - job.width) / 2, (image.height * scale - job.height) / 2
    return (lens * np.float32(scale) - np.array([0, 0, left, top], np.float32)).astype(np.float32)


def _check_count(name: str, count: int, job: Job) -> None:
    if count < job.frames:
        raise _fault(name, f"it has {count} poses, fewer than the {job.frames} frames of the job")


def _fault(name: str, reason: str) -> UnusableInput:
    return UnusableInput(f"extra.{name}: {reason}", param=f"extra.{name}")
