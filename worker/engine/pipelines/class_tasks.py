"""The tasks that a pipeline class of diffusers does, before its weights are loaded."""

from typing import Any

import diffusers
from diffusers.pipelines import auto_pipeline

from shared.tasks import Task
from worker.engine.pipelines.modular import task_fault
from worker.engine.pipelines.task_pipelines import supports

_AUTOMATIC = {
    Task.TEXT_TO_IMAGE: "AUTO_TEXT2IMAGE_PIPELINES_MAPPING",
    Task.IMAGE_TO_IMAGE: "AUTO_IMAGE2IMAGE_PIPELINES_MAPPING",
    Task.INPAINT: "AUTO_INPAINT_PIPELINES_MAPPING",
}


def class_tasks(name: str) -> tuple[Task, ...]:
    """Return the tasks of a class, and of the classes with the same modules that diffusers' automatic pipelines know;
    none for a class that diffusers does not have."""
    found: Any = getattr(diffusers, name, None)
    if not isinstance(found, type):
        return ()
    if issubclass(found, diffusers.ModularPipeline):
        blocks = found()._blocks
        return tuple(task for task in Task if task_fault(task, blocks) is None)
    return tuple(task for task in Task if _does(found, task))


def _does(found: Any, task: Task) -> bool:
    if supports(task, object.__new__(found)):
        return True
    table = getattr(auto_pipeline, _AUTOMATIC[task]) if task in _AUTOMATIC else {}
    other = auto_pipeline._get_task_class(table, found.__name__, throw_error_if_not_exist=False)
    return other is not None and supports(task, object.__new__(other))
