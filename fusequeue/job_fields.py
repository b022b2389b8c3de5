"""Fields of jobs and the values that they can have, from the service's own declarations of them.

Written by `python -m api.client_types > fusequeue/job_fields.py`; change nothing here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias, TypedDict

from pydantic import BaseModel, Field, JsonValue, SkipValidation

JobState: TypeAlias = Literal["queued", "running", "succeeded", "failed", "canceled", "expired"]
JobPhase: TypeAlias = Literal["loading", "denoising", "decoding", "uploading"]
PriorityName: TypeAlias = Literal["interactive", "standard", "bulk"]
OnDeadlineName: TypeAlias = Literal["expire", "run"]
OnParentFailureName: TypeAlias = Literal["fail", "run"]
TaskName: TypeAlias = Literal[
    "text_to_image",
    "image_to_image",
    "inpaint",
    "edit",
    "upscale",
    "text_to_video",
    "image_to_video",
    "video_to_video",
    "extend_video",
    "upscale_video",
    "animate",
    "text_to_audio",
    "audio_to_audio",
    "audio_inpaint",
    "image_to_mesh",
]
FormatName: TypeAlias = Literal["png", "jpeg", "webp", "mp4", "wav", "flac", "mp3", "opus", "glb", "latent"]
CacheLevelName: TypeAlias = Literal["off", "light", "medium", "strong"]
DeliveryState: TypeAlias = Literal["delivered", "pending", "failed"]
JobEventName: TypeAlias = Literal[
    "job.queued",
    "job.running",
    "job.succeeded",
    "job.failed",
    "job.canceled",
    "job.expired",
]
EndpointEventName: TypeAlias = Literal[
    "job.queued",
    "job.running",
    "job.succeeded",
    "job.failed",
    "job.canceled",
    "job.expired",
    "batch.completed",
    "batch.failed",
    "batch.expired",
    "batch.cancelled",
    "video.completed",
    "video.failed",
]
"""What an endpoint can subscribe to: events of jobs, and OpenAI's of batches and videos."""


class SentFields(TypedDict, total=False):
    """Parameters of a job that are sent as they are."""

    extra: Mapping[str, JsonValue] | None
    """Inputs of the model that have no field of their own; `GET /v1/models/{id}` lists them."""
    repaint_start_s: float | None
    """Make `audio` anew from this second on."""
    repaint_end_s: float | None
    """Make `audio` anew up to this second."""
    negative_prompt: str | None
    """What the result is not to show or sound like. Unset: the model's default; an empty one is a text."""
    width: int | None
    """Pixels."""
    height: int | None
    """Pixels."""
    seed: int | None
    """Unset or -1: a random one, returned with the job."""
    steps: int | None
    """Denoising steps."""
    guidance_scale: float | None
    """How closely to follow the prompt."""
    guidance_scale_2: float | None
    """For the model's second denoiser, which does the less noisy steps."""
    refiner_start: float | None
    """Of models with a refiner: the share of the denoising from which it goes on; 1: no refiner. Unset: the model's
    default."""
    task: TaskName | None
    """Required only if the model has several tasks that match the other fields."""
    strength: float | None
    """How much to change `image`, `video` or `audio`: the share of the steps that run, at least one. With a mask, the
    default is 1."""
    frames: int | None
    """Length of a video. Unset: that of `video`, or the model's default."""
    fps: int | None
    """Frames per second of a video. Unset: those of `video`, or the model's default."""
    duration_s: float | None
    """Seconds of a sound. Unset: those of `audio`, or the model's default."""
    upscale_factor: float | None
    """How many times as long an upscaler makes the sides of `image` or `video`: one of the model's `upscale_factors`.
    Unset: the first of them."""
    layers: int | None
    """Images that a layered model splits each result into."""
    output_format: FormatName | None
    """Unset: png for images, wav for sounds; videos are always mp4, and meshes glb. Latents are for a job that
    continues: XL only."""
    prompt_2: str | None
    """For the model's second text encoder. Unset: `prompt`."""
    clip_skip: int | None
    """Last layers of CLIP to leave out."""
    max_sequence_length: int | None
    """Most tokens of a prompt."""
    true_cfg_scale: float | None
    """Guidance by a second, negative forward, in models whose `guidance_scale` is an input, such as FLUX: above 1, and
    with a `negative_prompt`."""
    guidance_rescale: float | None
    """Against overexposure by a high guidance scale; 0: none."""
    lyrics: str | None
    """Words that are sung. Unset: an instrumental."""
    denoising_end: float | None
    """Leave the rest of the denoising to another job, from this share of it. XL only."""
    denoising_start: float | None
    """Continue the denoising of `image`, of a job with this `denoising_end`. XL only."""
    n: int | None
    """Number of results; result i uses seed + i."""
    keep_unmasked: bool | None
    """With `mask`: what is not repainted stays bit for bit."""
    mask_blur: int | None
    """Pixels over which the edge of `mask` fades into the image."""
    mask_padding: int | None
    """With `mask`: only its region and this many pixels around it are made, at the full size. Unset: the whole
    image."""
    reproducible: bool | None
    """Identical bits whatever other jobs are in the batch. A lone job takes longer, as its forwards have two rows."""
    output_quality: int | None
    """JPEG, WebP, MP4, MP3 and Opus."""
    embed_parameters: bool | None
    """Write the prompt, seed and other parameters into the file's metadata."""
    priority: PriorityName | None
    """Of a tenant's queued jobs, those of a higher priority go first."""
    on_deadline: OnDeadlineName | None
    """If a job can no longer end by its deadline: it expires at once, or runs late."""
    after: Sequence[str] | None
    """Ids of jobs that are to end before this one is queued."""
    on_parent_failure: OnParentFailureName | None
    """If a job in `after` fails, expires or is canceled: this one fails, or runs all the same."""
    metadata: Mapping[str, str] | None
    """Texts that are returned with the job; lists and changes can select by them."""
    batch_id: str | None
    """Lists and changes can select the jobs with one."""
    group: str | None
    """A name for many jobs: `/v1/groups` shows their progress; lists and changes can select them."""
    deadline_s: float | None
    """The job is to end within this many seconds from now. Of one priority, the least slack goes first."""
    webhook: str | None
    """An https URL that receives a signed POST when the job ends."""


class ReturnedFields(BaseModel):
    """What a job is to make, with every default chosen."""

    model: str
    """A model of `GET /v1/models`."""
    prompt: str
    """What the image, video or sound is of. Empty for meshes."""
    extra: dict[str, JsonValue] | None = None
    """Inputs of the model that have no field of their own; `GET /v1/models/{id}` lists them."""
    repaint_start_s: float | None = None
    """Make `audio` anew from this second on."""
    repaint_end_s: float | None = None
    """Make `audio` anew up to this second."""
    negative_prompt: str | None = None
    width: int
    height: int
    seed: int
    steps: int
    guidance_scale: float
    guidance_scale_2: float | None = None
    scheduler: str | None = None
    """A class of diffusers; null: the model's own."""
    refiner_start: float | None = None
    """The share of the denoising from which the model's refiner goes on; null: no refiner."""
    task: SkipValidation[TaskName] = "text_to_image"
    strength: float | None = None
    frames: int = 1
    """1 for images."""
    fps: int | None = None
    duration_s: float | None = None
    """Of a sound; its width and height are 0."""
    upscale_factor: float | None = None
    """Of an upscaler, which makes `width` and `height` by it."""
    layers: int = 0
    """Images that each result is split into; 0 if it is not split."""
    output_format: SkipValidation[FormatName] = "png"
    prompt_2: str | None = None
    """For the model's second text encoder. Unset: `prompt`."""
    clip_skip: int | None = None
    """Last layers of CLIP to leave out."""
    max_sequence_length: int | None = None
    """Most tokens of a prompt."""
    true_cfg_scale: float | None = None
    """Guidance by a second, negative forward, in models whose `guidance_scale` is an input, such as FLUX: above 1, and
    with a `negative_prompt`."""
    guidance_rescale: float | None = None
    """Against overexposure by a high guidance scale; 0: none."""
    lyrics: str | None = None
    """Words that are sung. Unset: an instrumental."""
    denoising_end: float | None = None
    """Leave the rest of the denoising to another job, from this share of it. XL only."""
    denoising_start: float | None = None
    """Continue the denoising of `image`, of a job with this `denoising_end`. XL only."""
    n: int = 1
    """Number of results; result i uses seed + i."""
    keep_unmasked: bool = True
    """With `mask`: what is not repainted stays bit for bit."""
    mask_blur: int = 0
    """Pixels over which the edge of `mask` fades into the image."""
    mask_padding: int | None = None
    """With `mask`: only its region and this many pixels around it are made, at the full size. Unset: the whole
    image."""
    reproducible: bool = False
    """Identical bits whatever other jobs are in the batch. A lone job takes longer, as its forwards have two rows."""
    output_quality: int = 90
    """JPEG, WebP, MP4, MP3 and Opus."""
    embed_parameters: bool = False
    """Write the prompt, seed and other parameters into the file's metadata."""
    priority: SkipValidation[PriorityName] = "standard"
    """Of a tenant's queued jobs, those of a higher priority go first."""
    on_deadline: SkipValidation[OnDeadlineName] = "expire"
    """If a job can no longer end by its deadline: it expires at once, or runs late."""
    after: tuple[str, ...] = ()
    """Ids of jobs that are to end before this one is queued."""
    on_parent_failure: SkipValidation[OnParentFailureName] = "fail"
    """If a job in `after` fails, expires or is canceled: this one fails, or runs all the same."""
    metadata: dict[str, str] = Field(default_factory=dict)
    """Texts that are returned with the job; lists and changes can select by them."""
    batch_id: str | None = None
    """Lists and changes can select the jobs with one."""
    group: str | None = None
    """A name for many jobs: `/v1/groups` shows their progress; lists and changes can select them."""
