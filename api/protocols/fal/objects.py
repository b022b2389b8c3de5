"""Schemas of fal's objects, for the OpenAPI document: their routes build them as plain JSON."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class _Object(BaseModel):
    model_config = ConfigDict(json_schema_serialization_defaults_required=True)


class FalLogLine(_Object):
    """A line of a request's log; the time is ISO 8601."""

    timestamp: str
    level: Literal["INFO"]
    source: Literal["USER"]
    message: str


class FalStatus(BaseModel):
    """The status of a request, a job."""

    status: Literal["IN_QUEUE", "IN_PROGRESS", "COMPLETED"]
    request_id: str
    response_url: str
    status_url: str
    cancel_url: str
    queue_position: int | None = Field(None, ge=0, description="In the queue only.")
    logs: list[FalLogLine] | None = Field(None, description="With `logs=1`.")
    metrics: dict[str, float] | None = Field(None, description="Of a completed request.")
    error: str | None = Field(None, description="Why a completed request has no result.")
    error_type: str | None = Field(None, description="The code of the error.")


class FalFile(_Object):
    """An image, video or sound of a result; a sound has no sides."""

    url: str
    content_type: str
    file_name: str
    file_size: int
    width: int | None = None
    height: int | None = None


class FalResult(BaseModel):
    """The result of a completed request: `images`, `video` or `audio`."""

    images: list[FalFile] | None = None
    video: FalFile | None = None
    audio: FalFile | None = None
    seed: int
    prompt: str
    has_nsfw_concepts: list[bool]
    timings: dict[str, float]


class FalCancellation(_Object):
    """The answer to a cancellation."""

    status: Literal["CANCELLATION_REQUESTED", "ALREADY_COMPLETED"]


class FalUpload(_Object):
    """Where an image is sent with `PUT`, and its name in an input."""

    file_url: str
    upload_url: str


class FalUploaded(_Object):
    """An uploaded image, as an input names it."""

    file_url: str
