"""Which task a request means: told by what it sends and by what its model does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.config.models_file import ModelSpec
from shared.errors import InvalidRequest
from shared.job import Task

FROM_PICTURES = (Task.IMAGE_TO_IMAGE, Task.EDIT, Task.IMAGE_TO_VIDEO)
FROM_WORDS = (Task.TEXT_TO_IMAGE, Task.TEXT_TO_VIDEO)


@dataclass(frozen=True)
class Sent:
    """What a request carries, as far as it tells the task. `field` names the one its pictures came in."""

    images: int = 0
    field: str = "image"
    mask: bool = False
    last_image: bool = False
    strength: bool = False
    frames: bool = False


def task_of(sent: Sent, spec: ModelSpec, asked: Task | None = None) -> Task:
    """Return the task, or raise `InvalidRequest` that names the field which does not go with the model or the rest.

    A mask means inpainting; without one, the pictures, `last_image`, `strength` and `frames` leave those tasks of
    the model that take them. If that is not exactly one, the request has to say which.
    """
    if asked is not None:
        if asked not in spec.tasks:
            raise _not_done(spec, asked.value, "task")
        _check(sent, asked)
        return asked
    fitting = [task for task in _meant(sent) if task in spec.tasks]
    if len(fitting) > 1:
        raise InvalidRequest(f"task: say which is meant: {_names(fitting)}", param="task")
    if not fitting:
        raise _unfit(sent, spec)
    _check(sent, fitting[0])
    return fitting[0]


def _meant(sent: Sent) -> Sequence[Task]:
    if sent.mask:
        return (Task.INPAINT,)
    tasks: Sequence[Task] = FROM_PICTURES if sent.images or sent.last_image else FROM_WORDS
    if sent.images > 1:
        tasks = (Task.EDIT,)
    if sent.last_image:
        tasks = (Task.IMAGE_TO_VIDEO,)
    if sent.strength and Task.IMAGE_TO_IMAGE in tasks:
        tasks = (Task.IMAGE_TO_IMAGE,)
    if sent.frames and any(task.makes_video for task in tasks):
        tasks = [task for task in tasks if task.makes_video]
    return tasks


def _unfit(sent: Sent, spec: ModelSpec) -> InvalidRequest:
    meant = _meant(sent)
    if not sent.images:
        if sent.mask or sent.last_image:
            return _needs_image("mask" if sent.mask else "last_image")
        if not any(task in FROM_WORDS for task in spec.tasks):
            return InvalidRequest(f"image: model {spec.id!r} needs one; it does {_names(spec.tasks)}", param="image")
    told_by = {
        "mask": sent.mask,
        "last_image": sent.last_image,
        "strength": sent.strength and Task.IMAGE_TO_IMAGE in meant,
        "frames": sent.frames,
    }
    param = next((name for name, told in told_by.items() if told), sent.field)
    return _not_done(spec, " or ".join(task.value for task in meant), param)


def _not_done(spec: ModelSpec, what: str, param: str) -> InvalidRequest:
    return InvalidRequest(f"model {spec.id!r} does not do {what}; it does {_names(spec.tasks)}", param=param)


def _needs_image(param: str) -> InvalidRequest:
    return InvalidRequest(f"{param} needs an image to go with", param=param)


def _names(tasks: Sequence[Task]) -> str:
    return ", ".join(task.value for task in tasks)


def _check(sent: Sent, task: Task) -> None:
    """Raise `InvalidRequest` naming the first thing sent that `task` has no use for, or that it lacks."""
    if task in FROM_WORDS and sent.images:
        raise InvalidRequest(f"{task.value} takes no pictures", param=sent.field)
    if task not in FROM_WORDS and not sent.images:
        raise InvalidRequest(f"image: {task.value} needs one", param="image")
    if sent.images > 1 and task is not Task.EDIT:
        raise InvalidRequest(f"{task.value} takes one picture, not {sent.images}", param=sent.field)
    if sent.mask != (task is Task.INPAINT):
        words = "takes no mask" if sent.mask else "needs a mask"
        raise InvalidRequest(f"{task.value} {words}", param="mask")
    if sent.last_image and task is not Task.IMAGE_TO_VIDEO:
        raise InvalidRequest(f"{task.value} takes no last_image", param="last_image")
    if sent.strength and not task.has_strength:
        words = "needs an image to start from" if not sent.images else f"has no meaning for {task.value}"
        raise InvalidRequest(f"strength {words}", param="strength")
    if sent.frames and not task.makes_video:
        raise InvalidRequest(f"{task.value} makes no video", param="frames")
