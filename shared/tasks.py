"""The task of a request: named by the client, or implied by the fields it sends and the tasks of its model."""

from __future__ import annotations

from collections.abc import Sequence

from shared.config.models_file import ModelSpec
from shared.errors import InvalidRequest
from shared.job import Task
from shared.request import JobRequest

_WITH_IMAGE = (Task.IMAGE_TO_IMAGE, Task.EDIT, Task.IMAGE_TO_VIDEO)
_FROM_TEXT = (Task.TEXT_TO_IMAGE, Task.TEXT_TO_VIDEO)


def task_of(request: JobRequest, spec: ModelSpec) -> Task:
    """Return the request's task, or raise `InvalidRequest` that names the field that does not match it.

    A mask implies inpainting. Without a mask, the images, `last_image`, `strength` and `frames` select among the
    model's tasks; if more than one remains, the request must name its task.
    """
    if request.image is not None and request.images is not None:
        raise InvalidRequest("images: send either image or images, not both", param="images")
    if request.task is not None:
        if request.task not in spec.tasks:
            raise _unsupported(spec, request.task.value, "task")
        _check_fields(request, request.task)
        return request.task
    matching = [task for task in _implied(request) if task in spec.tasks]
    if len(matching) > 1:
        raise InvalidRequest(f"task: ambiguous; send one of {_names(matching)}", param="task")
    if not matching:
        raise _no_match(request, spec)
    _check_fields(request, matching[0])
    return matching[0]


def _implied(request: JobRequest) -> Sequence[Task]:
    """Return the tasks that the fields sent allow, whatever the model."""
    if request.mask is not None:
        return (Task.INPAINT,)
    tasks: Sequence[Task] = _WITH_IMAGE if request.image_values or request.last_image is not None else _FROM_TEXT
    if len(request.image_values) > 1:
        tasks = (Task.EDIT,)
    if request.last_image is not None:
        tasks = (Task.IMAGE_TO_VIDEO,)
    if request.strength is not None and Task.IMAGE_TO_IMAGE in tasks:
        tasks = (Task.IMAGE_TO_IMAGE,)
    if request.frames is not None and any(task.makes_video for task in tasks):
        tasks = [task for task in tasks if task.makes_video]
    return tasks


def _no_match(request: JobRequest, spec: ModelSpec) -> InvalidRequest:
    """Return the error for a request that matches no task of the model; it names the field that excluded the rest."""
    implied = _implied(request)
    if not request.image_values:
        for param in ("mask", "last_image"):
            if getattr(request, param) is not None:
                return InvalidRequest(f"{param} needs an image", param=param)
        if not any(task in _FROM_TEXT for task in spec.tasks):
            return InvalidRequest(f"image: model {spec.id!r} needs one; its tasks: {_names(spec.tasks)}", param="image")
    decisive = {
        "mask": request.mask is not None,
        "last_image": request.last_image is not None,
        "strength": request.strength is not None and Task.IMAGE_TO_IMAGE in implied,
        "frames": request.frames is not None,
    }
    param = next((name for name, is_sent in decisive.items() if is_sent), _image_field(request))
    return _unsupported(spec, " or ".join(task.value for task in implied), param)


def _check_fields(request: JobRequest, task: Task) -> None:
    """Raise `InvalidRequest` naming the first field that `task` does not use or lacks."""
    count, field = len(request.image_values), _image_field(request)
    if task in _FROM_TEXT and count:
        raise InvalidRequest(f"{task.value} takes no images", param=field)
    if task not in _FROM_TEXT and not count:
        raise InvalidRequest(f"image: {task.value} needs one", param="image")
    if count > 1 and task is not Task.EDIT:
        raise InvalidRequest(f"{task.value} takes one image, not {count}", param=field)
    if (request.mask is not None) != (task is Task.INPAINT):
        verb = "needs a mask" if request.mask is None else "takes no mask"
        raise InvalidRequest(f"{task.value} {verb}", param="mask")
    if request.last_image is not None and task is not Task.IMAGE_TO_VIDEO:
        raise InvalidRequest(f"{task.value} takes no last_image", param="last_image")
    if request.strength is not None and not task.has_strength:
        reason = f"has no effect on {task.value}" if count else "needs an image to start from"
        raise InvalidRequest(f"strength {reason}", param="strength")
    if request.frames is not None and not task.makes_video:
        raise InvalidRequest(f"{task.value} makes no video", param="frames")


def _image_field(request: JobRequest) -> str:
    return "images" if request.images is not None else "image"


def _unsupported(spec: ModelSpec, task: str, param: str) -> InvalidRequest:
    return InvalidRequest(f"model {spec.id!r} does not support {task}; its tasks: {_names(spec.tasks)}", param=param)


def _names(tasks: Sequence[Task]) -> str:
    return ", ".join(task.value for task in tasks)
