"""A family of the second grid: one tiny pipeline of a class beyond those that the first grid lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from parity.cells import LONG, Cell, Fields, edits
from tiny import registry

from shared.config.controls import Control, ControlSpec
from shared.config.request_limits import Defaults, Limits
from shared.tasks import Task

# Some of equal length, as inferred rules pad no prompt.
TEXT: Mapping[str, Fields] = {
    "plain": {"prompt": "a dog", "steps": 3},
    "like": {"prompt": "a cat", "steps": 4, "guidance_scale": 6.0},
    "long": {"prompt": LONG, "steps": 4, "guidance_scale": 7.5},
    "negative": {"prompt": "a town at night", "negative_prompt": "rain, snow", "guidance_scale": 2.5, "steps": 3},
    "two": {"prompt": "a pig", "n": 2, "steps": 2},
}
# Some with as many tokens, as ACE-Step's denoiser has no mask.
SONGS: Mapping[str, Fields] = {
    "plain": {"prompt": "a dog", "steps": 3},
    "like": {"prompt": "a boat", "steps": 4, "guidance_scale": 6.0},
    "long": {"prompt": LONG, "steps": 4, "guidance_scale": 7.5},
    "negative": {"prompt": "a town at night", "negative_prompt": "rain, snow", "guidance_scale": 2.5, "steps": 3},
    "unguided": {"prompt": "a mill", "guidance_scale": 1.0, "steps": 3},
    "two": {"prompt": "a lake", "n": 2, "steps": 2},
}
UPSCALED = 128  # pixels of a side: the denoiser of latents needs 16 values
LATE: Mapping[str, Fields] = {"late": {"prompt": "a fox", "steps": 3}}


@dataclass(frozen=True)
class Family(Cell):
    """A cell with any number of rows in its first forward.

    With `fused` its jobs must share forwards; without, they can.
    """

    fused: bool = True


def small(tiny: str, context: str) -> Callable[[], AbstractContextManager[Any]]:
    """Return the `context` of the module of a tiny pipeline, which is imported when entered."""
    if not context:
        return nullcontext
    return lambda: getattr(registry.module_of(tiny), context)()  # type: ignore[no-any-return]


def image(
    family: str, pipeline: str, tiny: str, *, task: Task = Task.TEXT_TO_IMAGE, around: str = "", **more: Any
) -> Family:
    """Return a family of images; `around` names its context."""
    match task:
        case Task.TEXT_TO_IMAGE:
            jobs, late = TEXT, LATE
        case Task.EDIT:
            jobs, late = edits(TEXT), edits(LATE)
        case Task.UPSCALE:
            same = {"task": task, "width": UPSCALED, "height": UPSCALED}
            more["spec"] = {"defaults": Defaults(width=UPSCALED, height=UPSCALED, steps=4, guidance_scale=4.0)}
            jobs, late = ({name: {**fields, **same} for name, fields in some.items()} for some in (TEXT, LATE))
        case _:
            jobs, late = (
                {name: {**fields, "task": task, "strength": 0.8} for name, fields in some.items()}
                for some in (TEXT, LATE)
            )
    return Family(
        family=family,
        models="",
        pipelines=pipeline,
        tiny=tiny,
        jobs=jobs,
        joining=late,
        tasks=(task,),
        around=small(tiny, around),
        **more,
    )


class Clip(NamedTuple):
    """The size of a family's videos: `frames`, in groups of `group` after the first, of `side` x `side` pixels."""

    frames: int = 9
    group: int = 4
    side: int = 64


def video(
    family: str,
    pipeline: str,
    tiny: str,
    clip: Clip = Clip(),  # noqa: B008  # it never changes
    *,
    task: Task = Task.TEXT_TO_VIDEO,
    around: str = "",
    **more: Any,
) -> Family:
    """Return a family of videos; `same` are fields of all jobs."""
    frames, group, side = clip
    same: Fields = more.pop("same", {})
    each = {"task": task, "frames": frames, "fps": 24, "width": side, "height": side, **same}
    jobs, late = ({name: {**fields, **each} for name, fields in some.items() if name != "two"} for some in (TEXT, LATE))
    return Family(
        family=family,
        models="",
        pipelines=pipeline,
        tiny=tiny,
        jobs=jobs,
        joining=late,
        tasks=(task,),
        around=small(tiny, around),
        spec={
            "limits": Limits(min_side=side, multiple_of=16, max_frames=frames, frames_multiple=group, max_images=8),
            "defaults": Defaults(width=side, height=side, frames=frames, **{"steps": 4, "guidance_scale": 4.0, **same}),
        },
        **more,
    )


def sound(family: str, pipeline: str, tiny: str, *, tasks: tuple[Task, ...], **more: Any) -> Family:
    """Return a family of sounds, whose jobs do all of `tasks`."""
    same: Fields = {"duration_s": 2.0, **more.pop("same", {})}
    usual = {name: value for name, value in same.items() if name in Defaults.model_fields}
    starts: Mapping[Task, Fields] = {
        Task.TEXT_TO_AUDIO: {},
        Task.AUDIO_TO_AUDIO: {"strength": 0.7},
        Task.AUDIO_INPAINT: {"strength": 1.0, "repaint_start_s": 0.5, "repaint_end_s": 1.2},
    }
    jobs = {
        f"{name}-{task.value}": {**fields, **starts[task], "task": task, **same}
        for task in tasks
        for name, fields in SONGS.items()
    }
    late = {"late": {"prompt": "a fox", "steps": 3, **starts[tasks[0]], "task": tasks[0], **same}}
    return Family(
        family=family,
        models="",
        pipelines=pipeline,
        tiny=tiny,
        jobs=jobs,
        joining=late,
        tasks=tasks,
        spec={
            "limits": Limits(max_duration_s=2, max_images=8),
            "defaults": Defaults(**{"steps": 4, "guidance_scale": 4.0, **usual}),
        },
        **more,
    )


def from_videos(family: Family) -> Family:
    """Return a family whose model changes videos, by different strengths, and also makes them of text."""
    changed = {
        f"{name}-from-video": {**fields, "task": Task.VIDEO_TO_VIDEO, "strength": 0.5 + 0.125 * at}
        for at, (name, fields) in enumerate(family.jobs.items())
    }
    tasks = (*family.tasks, Task.VIDEO_TO_VIDEO)
    return replace(family, tasks=tasks, jobs=dict([*family.jobs.items()][:2]) | changed)


def with_structure(family: Family) -> Family:
    """Return a family of edits that follow structure whose jobs also change and repaint images, by structure beside."""
    tasks, control = (Task.IMAGE_TO_IMAGE, Task.INPAINT), Control(id="outline", kind="structure")
    begun = {
        f"{name}-{task.value}": {**fields, "task": task, "strength": 0.6 + 0.1 * at, "controls": (control,)}
        for task in tasks
        for at, (name, fields) in enumerate([*family.jobs.items()][:3])
    }
    spec = {"control": (ControlSpec(id="outline", kind="structure"),)}
    return replace(family, tasks=(*family.tasks, *tasks), jobs={**family.jobs, **begun}, spec=spec)


def extended(family: Family) -> Family:
    """Return a family whose model also goes on from videos, in the forwards of its other tasks."""
    jobs = {
        f"{name}-extended": {**fields, "task": Task.EXTEND_VIDEO}
        for name, fields in family.jobs.items()
        if fields["task"] is Task.TEXT_TO_VIDEO
    }
    return replace(family, tasks=(*family.tasks, Task.EXTEND_VIDEO), jobs={**family.jobs, **jobs})


def both(family: Family) -> Family:
    """Return a family of videos of text whose jobs also begin with an image."""
    tasks = (Task.TEXT_TO_VIDEO, Task.IMAGE_TO_VIDEO)
    jobs = {f"{name}-{task.value}": {**fields, "task": task} for task in tasks for name, fields in family.jobs.items()}
    return replace(family, tasks=tasks, jobs=jobs)
