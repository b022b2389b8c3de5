"""The request for a job: the body that clients send, and its parsing. `shared.job_builder` builds the job."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from shared.config.adapters import MAX_ADAPTERS, AdapterChoice
from shared.config.models_file import MAX_FPS, MAX_INPUT_IMAGES
from shared.errors import InvalidRequest
from shared.job import OutputFormat, Priority, Task
from shared.webhooks import JobEventName

Body = TypeVar("Body", bound=BaseModel)
MAX_SEED = 2**63 - 1
MAX_DEADLINE_S = 7 * 86_400
_MESSAGES = {"extra_forbidden": "there is no such field", "model_type": "it must be a JSON object"}

MetadataKey = Annotated[str, Field(min_length=1, max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


class JobRequest(BaseModel):
    """The body of `POST /v1/jobs`, and one line of `POST /v1/jobs:bulk`."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        json_schema_extra={
            "examples": [
                {"model": "demo", "prompt": "a red circle on a blue ground, left"},
                {"model": "demo", "prompt": "a green square on a white ground, top", "seed": 7, "steps": 16, "n": 2},
            ]
        },
    )

    model: str = Field(max_length=128, description="A model of `GET /v1/models`.")
    prompt: str = Field(min_length=1, max_length=100_000)
    negative_prompt: str | None = Field(None, max_length=100_000)
    width: int | None = Field(None, strict=True, ge=1, description="Pixels.")
    height: int | None = Field(None, strict=True, ge=1, description="Pixels.")
    n: int = Field(1, strict=True, ge=1, description="Number of images; image i uses seed + i.")
    seed: int | None = Field(
        None, strict=True, ge=0, le=MAX_SEED, description="Unset: a random one, returned with the job."
    )
    steps: int | None = Field(None, strict=True, ge=1, validation_alias=AliasChoices("steps", "num_inference_steps"))
    guidance_scale: float | None = Field(None, strict=True, ge=0)
    guidance_scale_2: float | None = Field(
        None, strict=True, ge=0, description="For the model's second denoiser, which does the less noisy steps."
    )
    scheduler: str | None = Field(None, max_length=64)
    adapters: tuple[AdapterChoice, ...] = Field((), max_length=MAX_ADAPTERS, description="LoRA adapters to apply.")
    task: Task | None = Field(
        None, description="Required only if the model has several tasks that match the other fields."
    )
    image: str | None = Field(
        None, description="Start from this image: an id of `POST /v1/inputs`, a data URL or an https URL."
    )
    images: tuple[str, ...] | None = Field(
        None, min_length=1, max_length=MAX_INPUT_IMAGES, description="Several images to edit, instead of `image`."
    )
    mask: str | None = Field(
        None, description="Repaint `image` where this is white or transparent. Same proportions as `image`."
    )
    last_image: str | None = Field(None, description="Last frame of a video that starts from `image`.")
    strength: float | None = Field(
        None, strict=True, gt=0, le=1, description="How much to change `image`; with a mask, the default is 1."
    )
    frames: int | None = Field(None, strict=True, ge=1, description="Length of a video.")
    fps: int | None = Field(None, strict=True, ge=1, le=MAX_FPS, description="Frames per second of a video.")
    layers: int | None = Field(
        None, strict=True, ge=1, description="Images that a layered model splits each result into."
    )
    reproducible: bool = Field(False, strict=True, description="Identical bits whatever other jobs are in the batch.")
    output_format: OutputFormat | None = Field(None, description="Unset: png for images; videos are always mp4.")
    output_quality: int = Field(90, strict=True, ge=1, le=100, description="JPEG, WebP and MP4.")
    embed_parameters: bool = Field(
        False, strict=True, description="Write the prompt, seed and other parameters into the image's metadata."
    )
    priority: Priority = Priority.STANDARD
    deadline_s: float | None = Field(
        None, strict=True, gt=0, le=MAX_DEADLINE_S, description="Expire the job this many seconds from now."
    )
    metadata: dict[MetadataKey, MetadataValue] = Field(default_factory=dict, max_length=16)
    batch_id: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]{1,64}$")
    webhook: str | None = Field(
        None, max_length=2048, description="An https URL that receives a signed POST when the job ends."
    )
    webhook_events: tuple[JobEventName, ...] | None = Field(
        None, min_length=1, description="Events sent to `webhook`. Unset: those that end the job."
    )

    @property
    def image_values(self) -> dict[str, str]:
        """Values of `image` or `images`, by field path."""
        if self.image is not None:
            return {"image": self.image}
        return {f"images.{index}": value for index, value in enumerate(self.images or ())}


def parse(body: Any) -> JobRequest:
    """Validate a decoded JSON body, or raise `InvalidRequest` that names the first invalid field."""
    return validated(JobRequest, body)


def validated(model: type[Body], body: Any) -> Body:
    """Validate a decoded JSON body of any model, or raise `InvalidRequest` that names the first invalid field."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"] if part != "[key]").rstrip(".") or None
        message = _MESSAGES.get(first["type"], first["msg"])
        raise InvalidRequest(f"{param or 'body'}: {message}", param=param) from error
