"""Routes that list the models."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field

from api.context import Services, ServicesDep
from api.http.lists import known_parameters
from api.http.openapi import problems
from shared.config.adapters import Kind
from shared.config.model_spec import ModelSpec, PromptSyntax
from shared.config.request_limits import Defaults, Limits
from shared.config.step_schedules import StepCaching
from shared.errors import Unavailable
from shared.model_inputs import ModelInput
from shared.queue import WorkerInfo
from shared.signature import Mixable
from shared.tasks import Task

_WORKERS_TIMEOUT_S = 1.0

router = APIRouter(prefix="/v1/models", tags=["models"])


class AdapterObject(BaseModel):
    """An adapter that a job can name in `adapters`."""

    id: str
    kind: Kind = Field(description="An embedding (textual inversion) has no scale.")
    token: str | None = Field(description="Of an embedding: the word that stands for it in prompts.")
    scale: float = Field(description="Default scale.")
    max_scale: float = Field(description="Largest absolute scale.")


class ControlTypeObject(BaseModel):
    """A control that a job can name in `controls`."""

    id: str
    kind: Literal["controlnet", "ip_adapter", "redux", "structure"]
    scale: float = Field(description="Default scale.")
    max_scale: float = Field(description="Largest scale.")


class RefinerObject(BaseModel):
    """The refiner of a model, which makes the last steps of a job with a `refiner_start`."""

    start: float = Field(description="`refiner_start` of jobs from text that do not say; 1: they have no refiner.")
    tasks: tuple[Task, ...] = Field(description="Tasks whose jobs can have it.")


class WorkersOfModel(BaseModel):
    """How many live workers have a model where."""

    loaded: int = Field(description="In device memory: a job starts at once.")
    loading: int
    kept: int = Field(description="In CPU memory: a job starts after a copy.")
    failed: int = Field(description="The last load failed; it is repeated.")
    not_loaded: int


class ModelObject(BaseModel):
    """A model in OpenAI's form, with the defaults and limits of its jobs."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="Always 0; OpenAI's clients require it.", default=0)
    owned_by: str = "fusequeue"
    aliases: tuple[str, ...] = Field((), description="Other names that requests can use.")
    tasks: tuple[Task, ...]
    defaults: Defaults
    limits: Limits
    schedulers: tuple[str, ...] = Field(description="Values of `scheduler`; empty: only the model's default.")
    adapters: tuple[AdapterObject, ...] = Field(description="LoRA adapters and embeddings of the model.")
    controls: tuple[ControlTypeObject, ...] = Field(description="Controls of the model.")
    refiner: RefinerObject | None = Field(None, description="Null for a model without one.")
    scorer: Literal["prompt", "head"] | None = Field(
        None,
        description='What scores the candidates of `best_of`: "prompt", their similarity with it, or "head", one of '
        "the operator's that sees images only. Null for a model without a scorer.",
    )
    upscale_factors: tuple[float, ...] = Field(
        description="Values of `upscale_factor`, the default first; empty for models that upscale nothing, and until a "
        "worker has loaded a model of the hub.",
    )
    extra: tuple[ModelInput, ...] | None = Field(
        None, description="What `extra` of a request can have. Null in lists, and until a worker has loaded the model."
    )
    step_cache: StepCaching = Field(description="What `step_cache` of requests can be, its default, and the schedules.")
    prompt_syntax: PromptSyntax = Field(description='"weights": prompts of any length, with `(word:1.3)` and `BREAK`.')
    mixed_fields: tuple[Mixable, ...] = Field(
        description="Fields in which jobs of one fused forward can differ; sizes only if similar."
    )
    max_batch: int = Field(description="Maximum number of images in one fused forward.")
    window_ms: int = Field(description="Longest wait of a job for batch mates.")
    workers: WorkersOfModel | None = Field(description="Null while Redis cannot be reached.")


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelObject]


@router.get("", responses=problems(422), dependencies=[known_parameters()])
async def list_models(services: ServicesDep) -> ModelList:
    """List the models, with their tasks, defaults and limits."""
    workers = await _live_workers(services)
    await services.learned_models.refresh()
    return ModelList(data=[_object(spec, workers) for spec in services.catalog])


@router.get("/{model:path}", responses=problems(404))
async def get_model(model: str, services: ServicesDep) -> ModelObject:
    """Read one model."""
    await services.learned_models.refresh()
    spec = services.catalog.get(model)
    return _object(spec, await _live_workers(services), await _inputs_of(spec, services))


async def _inputs_of(spec: ModelSpec, services: Services) -> tuple[ModelInput, ...] | None:
    """Return the inputs of a model; None while Redis does not respond."""
    if not spec.extra:
        return ()
    try:
        async with asyncio.timeout(_WORKERS_TIMEOUT_S):
            return await services.queue.model_inputs.of(spec)
    except (Unavailable, TimeoutError):
        return None


async def _live_workers(services: Services) -> Sequence[WorkerInfo] | None:
    """Return the live workers, None while Redis does not respond: the models are known without it."""
    try:
        async with asyncio.timeout(_WORKERS_TIMEOUT_S):
            return await services.queue.workers.all()
    except (Unavailable, TimeoutError):
        return None


def _workers_of(model: str, workers: Sequence[WorkerInfo] | None) -> WorkersOfModel | None:
    if workers is None:
        return None
    counts = Counter[str](worker.memory_state(model) for worker in workers if model in worker.models)
    return WorkersOfModel(**{name: counts[name] for name in WorkersOfModel.model_fields})


def _refiner(spec: ModelSpec) -> RefinerObject | None:
    if spec.refiner is None:
        return None
    return RefinerObject(start=spec.refiner.start, tasks=tuple(task for task in spec.tasks if spec.refines(task)))


def _object(
    spec: ModelSpec, workers: Sequence[WorkerInfo] | None, inputs: tuple[ModelInput, ...] | None = None
) -> ModelObject:
    return ModelObject(
        id=spec.id,
        aliases=spec.aliases,
        tasks=spec.tasks,
        defaults=spec.defaults.model_copy(update=_usual(spec)),
        limits=spec.limits,
        schedulers=tuple(spec.usable_schedulers),
        adapters=tuple(
            AdapterObject(**adapter.model_dump(include={"id", "token", "scale", "max_scale"}), kind=adapter.kind)
            for adapter in spec.adapter
        ),
        controls=tuple(
            ControlTypeObject(**control.model_dump(include={"id", "kind", "scale", "max_scale"}))
            for control in spec.control
        ),
        refiner=_refiner(spec),
        scorer=None if spec.scorer is None else "prompt" if spec.scorer.head is None else "head",
        upscale_factors=spec.upscale_factors,
        extra=inputs if spec.extra else (),
        step_cache=spec.step_cache,
        prompt_syntax=spec.prompt_syntax,
        mixed_fields=spec.mixed_fields,
        max_batch=spec.max_batch,
        window_ms=spec.window_ms,
        workers=_workers_of(spec.id, workers),
    )


def _usual(spec: ModelSpec) -> dict[str, object]:
    """Return the defaults that follow from limits; seconds only of a model that makes sounds."""
    makes_audio = any(task.makes_audio for task in spec.tasks)
    return {"frames": spec.usual_frames, "duration_s": spec.usual_duration_s if makes_audio else None}
