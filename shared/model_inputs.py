"""Inputs of a model's pipeline that have no field of their own: what they are, and what of a job's `extra` is wrong."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jsonschema import Draft202012Validator
from pydantic import BaseModel, ConfigDict, Field, JsonValue

from shared.errors import InvalidRequest
from shared.tasks import Task


class ModelInput(BaseModel):
    """An input of a pipeline, as a worker that has loaded the model describes it."""

    model_config = ConfigDict(frozen=True)

    name: str
    description: str = ""
    type_schema: dict[str, Any] = Field(default_factory=dict, alias="schema", description="JSON Schema of its values.")
    default: JsonValue = None
    tasks: tuple[Task, ...] = ()


def extra_faults(
    extra: Mapping[str, JsonValue], inputs: Sequence[ModelInput], task: Task, model: str
) -> Iterator[InvalidRequest]:
    """Yield what is wrong with the values of a job, of the inputs that the pipeline of `task` has."""
    known = {one.name: one for one in inputs if task in one.tasks}
    for name, value in extra.items():
        param = f"extra.{name}"
        if name not in known:
            yield InvalidRequest(f"{param}: model {model!r} takes no such input for {task.value}", param=param)
        elif (fault := type_fault(known[name], value)) is not None:
            yield InvalidRequest(f"{param}{fault}", param=param)


def type_fault(one: ModelInput, value: JsonValue) -> str | None:
    """Return what of a value the type of an input does not allow, None if nothing."""
    error = next(iter(Draft202012Validator(one.type_schema).iter_errors(value)), None)
    if error is None:
        return None
    place = "".join(f"[{at}]" if isinstance(at, int) else f".{at}" for at in error.absolute_path)
    return f"{place}: {error.message}"[:300]
