"""The fields of jobs, each declared once: type, bounds, default, text, and whether batch mates must have it alike.

`JobRequest`, `Job` and the `JobObject` of responses inherit the classes below, and take over their fields by name.
Images, and other objects that a job has in another form than its request, are declared where they are converted.
"""

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, AliasChoices, BaseModel, BeforeValidator, Field, JsonValue, ValidationError
from pydantic_core import PydanticCustomError

from shared.config.candidates import BestOf
from shared.config.scheduler_choices import Scheduler, SchedulerOptions
from shared.config.step_schedules import Choice, StepSchedule
from shared.start_times import StartTime
from shared.tasks import OutputFormat, Task

MAX_SEED = 2**63 - 1
RANDOM_SEED = -1
"""As other services and user interfaces write a seed that they leave to the service."""

MAX_FPS = 120
MAX_DURATION_S = 3600.0
MAX_UPSCALE_FACTOR = 16.0
MAX_DEADLINE_S = 7 * 86_400
MAX_PARENTS = 16
MAX_EXTRA_INPUTS = 16
MAX_EXTRA_BYTES = 32 * 1024  # of 161 poses of a camera, with 9 characters a number
MAX_EXTRA_LEVELS = 16
MAX_COUNT = 2**31 - 1
"""Above every limit, so that arithmetic with it cannot overflow: JSON has integers of 4,300 digits."""

GROUP_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"

MESSAGES: Mapping[str, str] = {
    "extra_forbidden": "there is no such field",
    "model_type": "it must be a JSON object",
    "dict_type": "it must be a JSON object",
    "list_type": "it must be a list",
    "tuple_type": "it must be a list",
}
"""What clients read instead of Pydantic's own messages, by type of error."""


class Matching(StrEnum):
    """Whether a field must be equal in jobs with one signature."""

    MUST_MATCH = "must_match"
    MAY_DIFFER = "may_differ"


MUST_MATCH, MAY_DIFFER = Matching


class Priority(StrEnum):
    """Priorities, highest first."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BULK = "bulk"

    @property
    def rank(self) -> int:
        """0 for the highest priority; the number in Redis and in the batch scheduler."""
        return _RANKS[self]


_RANKS = {priority: rank for rank, priority in enumerate(Priority)}


class OnDeadline(StrEnum):
    """What becomes of a job that can no longer meet its deadline."""

    EXPIRE = "expire"
    RUN = "run"


class OnParentFailure(StrEnum):
    """What becomes of a job when one that it waits for has not succeeded."""

    FAIL = "fail"
    RUN = "run"


def _seed(value: int | None) -> int | None:
    """Return a seed, None for a random one."""
    return None if value == RANDOM_SEED else value


def _read_step_cache(value: Any) -> Any:
    """Return a level, or the schedule of an object; the error is one, not that of each form."""
    if value is None or isinstance(value, StepSchedule) or value in get_args(Choice):
        return value
    if not isinstance(value, dict):
        forms = f'{", ".join(get_args(Choice))} or a schedule such as {{"every": 3}}'
        raise PydanticCustomError("step_cache", "it must be {forms}", {"forms": forms})
    try:
        return StepSchedule.model_validate(value)
    except ValidationError as error:
        raise PydanticCustomError("step_cache", "{reason}", {"reason": first_reason(error)}) from None


def first_reason(error: ValidationError) -> str:
    """Return the first fault of an object, with its field."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {MESSAGES.get(first['type'], first['msg'])}"


def _bounded(extra: Any) -> Any:
    """Refuse what is too large or too deep: Pydantic reads and writes some 200 levels only."""
    limits = {"inputs": MAX_EXTRA_INPUTS, "bytes": MAX_EXTRA_BYTES, "levels": MAX_EXTRA_LEVELS}
    if _is_deeper(extra, MAX_EXTRA_LEVELS):
        raise PydanticCustomError("extra_levels", "it has at most {levels} levels", limits)
    if not isinstance(extra, dict):
        return extra
    try:
        size = len(json.dumps(extra, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace"))
    except (TypeError, ValueError):
        raise PydanticCustomError("extra_json", "it has a number that JSON cannot write") from None
    if len(extra) > MAX_EXTRA_INPUTS or size > MAX_EXTRA_BYTES:
        raise PydanticCustomError("extra_size", "it has at most {inputs} inputs and {bytes} bytes of JSON", limits)
    return extra


def _is_deeper(value: Any, levels: int) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels == 0 if not parts else levels == 0 or any(_is_deeper(part, levels - 1) for part in parts)


ExtraName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
Extra = Annotated[dict[ExtraName, JsonValue], BeforeValidator(_bounded)]
Count = Annotated[int, Field(strict=True, ge=1, le=MAX_COUNT)]
Seed = Annotated[int, Field(strict=True, ge=RANDOM_SEED, le=MAX_SEED)]
Guidance = Annotated[float, Field(strict=True, ge=0)]
Part = Annotated[float, Field(strict=True, gt=0, lt=1)]
RefinerStart = Annotated[float, Field(strict=True, gt=0, le=1)]
StepCacheChoice = Annotated[Choice | StepSchedule | None, BeforeValidator(_read_step_cache)]
JobId = Annotated[str, Field(pattern=r"^job_[0-9a-hjkmnp-tv-z]{26}$")]
MetadataKey = Annotated[str, Field(min_length=1, max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


class PipelineFields(BaseModel):
    """What the pipeline is to make, as the request says it. Images repeat these (`embed_parameters`)."""

    model: Annotated[str, MUST_MATCH, Field(max_length=128, description="A model of `GET /v1/models`.")]
    prompt: Annotated[
        str,
        MAY_DIFFER,
        Field(max_length=100_000, description="What the image, video or sound is of. Empty for meshes."),
    ]
    extra: Annotated[
        Extra | None,
        MAY_DIFFER,
        Field(description="Inputs of the model that have no field of their own; `GET /v1/models/{id}` lists them."),
    ] = None
    repaint_start_s: Annotated[
        float | None,
        MAY_DIFFER,
        Field(strict=True, ge=0, le=MAX_DURATION_S, description="Make `audio` anew from this second on."),
    ] = None
    repaint_end_s: Annotated[
        float | None,
        MAY_DIFFER,
        Field(strict=True, gt=0, le=MAX_DURATION_S, description="Make `audio` anew up to this second."),
    ] = None


class CallFields(BaseModel):
    """Arguments of the calls of some pipelines, by their names there. Jobs of the other pipelines get a warning.

    Those of `PARTS` are refused instead: without them the image is another one.
    """

    prompt_2: Annotated[
        str | None,
        MAY_DIFFER,
        Field(min_length=1, max_length=100_000, description="For the model's second text encoder. Unset: `prompt`."),
    ] = None
    clip_skip: Annotated[
        int | None, MAY_DIFFER, Field(strict=True, ge=1, le=11, description="Last layers of CLIP to leave out.")
    ] = None
    max_sequence_length: Annotated[
        int | None, MAY_DIFFER, Field(strict=True, ge=1, le=4096, description="Most tokens of a prompt.")
    ] = None
    true_cfg_scale: Annotated[
        Guidance | None,
        MAY_DIFFER,
        Field(
            description="Guidance by a second, negative forward, in models whose `guidance_scale` is an input, such as "
            "FLUX: above 1, and with a `negative_prompt`."
        ),
    ] = None
    guidance_rescale: Annotated[
        float | None,
        MAY_DIFFER,
        Field(strict=True, ge=0, le=1, description="Against overexposure by a high guidance scale; 0: none."),
    ] = None
    lyrics: Annotated[
        str | None,
        MAY_DIFFER,
        Field(min_length=1, max_length=100_000, description="Words that are sung. Unset: an instrumental."),
    ] = None
    denoising_end: Annotated[
        Part | None,
        MAY_DIFFER,
        Field(description="Leave the rest of the denoising to another job, from this share of it. XL only."),
    ] = None
    denoising_start: Annotated[
        Part | None,
        MAY_DIFFER,
        Field(description="Continue the denoising of `image`, of a job with this `denoising_end`. XL only."),
    ] = None


PARTS = ("denoising_start", "denoising_end")
"""Fields of jobs that denoise an image in parts."""


class ServiceFields(BaseModel):
    """How the service is to run, encode and deliver, as the request says it."""

    n: Annotated[Count, MAY_DIFFER, Field(description="Number of results; result i uses seed + i.")] = 1
    best_of: Annotated[
        BestOf | None,
        MAY_DIFFER,
        Field(
            description="Begin more images than are kept, and drop those that the model's scorer finds worst: `n` is "
            "`keep`, the best first. Only of models with a scorer."
        ),
    ] = None
    keep_unmasked: Annotated[
        bool, MAY_DIFFER, Field(strict=True, description="With `mask`: what is not repainted stays bit for bit.")
    ] = True
    mask_blur: Annotated[
        int,
        MAY_DIFFER,
        Field(strict=True, ge=0, le=256, description="Pixels over which the edge of `mask` fades into the image."),
    ] = 0
    mask_padding: Annotated[
        int | None,
        MAY_DIFFER,
        Field(
            strict=True,
            ge=0,
            le=4096,
            description="With `mask`: only its region and this many pixels around it are made, at the full size. "
            "Unset: the whole image.",
        ),
    ] = None
    # Its forwards have a fixed number of rows.
    reproducible: Annotated[
        bool,
        MUST_MATCH,
        Field(
            strict=True,
            description="Identical bits whatever other jobs are in the batch. A lone job takes longer, as its forwards "
            "have two rows.",
        ),
    ] = False
    output_quality: Annotated[
        int, MAY_DIFFER, Field(strict=True, ge=1, le=100, description="JPEG, WebP, MP4, MP3 and Opus.")
    ] = 90
    embed_parameters: Annotated[
        bool,
        MAY_DIFFER,
        Field(strict=True, description="Write the prompt, seed and other parameters into the file's metadata."),
    ] = False
    priority: Annotated[
        Priority, MAY_DIFFER, Field(description="Of a tenant's queued jobs, those of a higher priority go first.")
    ] = Priority.STANDARD
    on_deadline: Annotated[
        OnDeadline,
        MAY_DIFFER,
        Field(description="If a job can no longer end by its deadline: it expires at once, or runs late."),
    ] = OnDeadline.EXPIRE
    after: Annotated[
        tuple[JobId, ...],
        MAY_DIFFER,
        Field(max_length=MAX_PARENTS, description="Ids of jobs that are to end before this one is queued."),
    ] = ()
    on_parent_failure: Annotated[
        OnParentFailure,
        MAY_DIFFER,
        Field(description="If a job in `after` fails, expires or is canceled: this one fails, or runs all the same."),
    ] = OnParentFailure.FAIL
    metadata: Annotated[
        dict[MetadataKey, MetadataValue],
        MAY_DIFFER,
        Field(max_length=16, description="Texts that are returned with the job; lists and changes can select by them."),
    ] = Field(default_factory=dict)
    batch_id: Annotated[
        str | None,
        MAY_DIFFER,
        Field(pattern=r"^[A-Za-z0-9_-]{1,64}$", description="Lists and changes can select the jobs with one."),
    ] = None
    group: Annotated[
        str | None,
        MAY_DIFFER,
        Field(
            pattern=GROUP_NAME,
            description="A name for many jobs: `/v1/groups` shows their progress; lists and changes can select them.",
        ),
    ] = None


class ChoosableFields(BaseModel):
    """What a request can leave to the model or the service; `ChosenFields` are the same once they are chosen."""

    negative_prompt: str | None = Field(
        None,
        max_length=100_000,
        description="What the result is not to show or sound like. Unset: the model's default; an empty one is a text.",
    )
    width: Count | None = Field(None, description="Pixels.")
    height: Count | None = Field(None, description="Pixels.")
    seed: Annotated[Seed | None, AfterValidator(_seed)] = Field(
        None, description="Unset or -1: a random one, returned with the job."
    )
    steps: Count | None = Field(
        None, validation_alias=AliasChoices("steps", "num_inference_steps"), description="Denoising steps."
    )
    guidance_scale: Guidance | None = Field(None, description="How closely to follow the prompt.")
    guidance_scale_2: Guidance | None = Field(
        None, description="For the model's second denoiser, which does the less noisy steps."
    )
    scheduler: Scheduler = Field(
        None,
        description="A noise scheduler by a name, such as `euler_a`, `DPM++ 2M Karras` or a class of diffusers; or an "
        "object of `name` and options. Unset: the model's default.",
    )
    scheduler_options: SchedulerOptions | None = Field(
        None, description="Options of the noise scheduler, as in an object `scheduler`."
    )
    step_cache: StepCacheChoice = Field(
        None, description="Denoising steps to skip and extrapolate: a level, or a schedule. Unset: the model's default."
    )
    refiner_start: RefinerStart | None = Field(
        None,
        description="Of models with a refiner: the share of the denoising from which it goes on; 1: no refiner. "
        "Unset: the model's default.",
    )
    task: Task | None = Field(
        None, description="Required only if the model has several tasks that match the other fields."
    )
    strength: float | None = Field(
        None,
        strict=True,
        gt=0,
        le=1,
        description="How much to change `image`, `video` or `audio`: the share of the steps that run, at least one. "
        "With a mask, the default is 1.",
    )
    frames: Count | None = Field(None, description="Length of a video. Unset: that of `video`, or the model's default.")
    fps: Count | None = Field(
        None, le=MAX_FPS, description="Frames per second of a video. Unset: those of `video`, or the model's default."
    )
    duration_s: float | None = Field(
        None,
        strict=True,
        gt=0,
        le=MAX_DURATION_S,
        description="Seconds of a sound. Unset: those of `audio`, or the model's default.",
    )
    upscale_factor: float | None = Field(
        None,
        strict=True,
        gt=1,
        le=MAX_UPSCALE_FACTOR,
        description="How many times as long an upscaler makes the sides of `image` or `video`: one of the model's "
        "`upscale_factors`. Unset: the first of them.",
    )
    layers: Count | None = Field(None, description="Images that a layered model splits each result into.")
    output_format: OutputFormat | None = Field(
        None,
        description="Unset: png for images, wav for sounds; videos are always mp4, and meshes glb. Latents are for a "
        "job that continues: XL only.",
    )


class ConvertedFields(BaseModel):
    """What a request says of its job that the job has in another form."""

    deadline_s: float | None = Field(
        None,
        strict=True,
        gt=0,
        le=MAX_DEADLINE_S,
        description="The job is to end within this many seconds from now. Of one priority, the least slack goes first.",
    )
    not_before: StartTime | None = Field(
        None,
        description="Queue the job at this time, ISO 8601 with its zone, such as 2026-01-31T22:00:00Z, or after this "
        "many seconds; at most 30 days from now. A `deadline_s` counts from then.",
    )
    webhook: str | None = Field(
        None, max_length=2048, description="An https URL that receives a signed POST when the job ends."
    )


class ChosenFields(BaseModel):
    """What `ChoosableFields` leave open, with every default resolved. Sizes are in pixels."""

    negative_prompt: Annotated[str | None, MAY_DIFFER] = None
    width: Annotated[int, MUST_MATCH]
    height: Annotated[int, MUST_MATCH]
    seed: Annotated[int, MAY_DIFFER]
    steps: Annotated[int, MAY_DIFFER]
    guidance_scale: Annotated[float, MAY_DIFFER]
    guidance_scale_2: Annotated[float | None, MAY_DIFFER] = None
    scheduler: Annotated[
        str | None, MAY_DIFFER, Field(max_length=64, description="A class of diffusers; null: the model's own.")
    ] = None
    scheduler_options: Annotated[SchedulerOptions | None, MAY_DIFFER] = None
    step_cache: Annotated[
        StepSchedule | None, MAY_DIFFER, Field(description="Which steps are computed; null: all of them.")
    ] = None
    refiner_start: Annotated[
        float | None,
        MAY_DIFFER,
        Field(description="The share of the denoising from which the model's refiner goes on; null: no refiner."),
    ] = None
    task: Annotated[Task, MAY_DIFFER] = Task.TEXT_TO_IMAGE
    strength: Annotated[float | None, MAY_DIFFER] = None
    frames: Annotated[int, MUST_MATCH, Field(description="1 for images.")] = 1
    # Positions along time are in seconds if there is sound.
    fps: Annotated[int | None, MUST_MATCH] = None
    duration_s: Annotated[float | None, MUST_MATCH, Field(description="Of a sound; its width and height are 0.")] = None
    upscale_factor: Annotated[
        float | None, MAY_DIFFER, Field(description="Of an upscaler, which makes `width` and `height` by it.")
    ] = None
    layers: Annotated[
        int, MUST_MATCH, Field(description="Images that each result is split into; 0 if it is not split.")
    ] = 0
    output_format: Annotated[OutputFormat, MAY_DIFFER] = OutputFormat.PNG


SENT_FIELDS = (*PipelineFields.model_fields, *CallFields.model_fields, *ServiceFields.model_fields)
"""Names of the fields that a job and its response have as they were sent."""
