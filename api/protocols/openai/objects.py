"""Schemas of OpenAI's objects, for the OpenAPI document: their routes build them as plain JSON."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from shared.job_record import FieldWarning


class _Object(BaseModel):
    model_config = ConfigDict(json_schema_serialization_defaults_required=True)


class _Page(_Object):
    """A page of a list; `after=last_id` returns the next one."""

    object: Literal["list"] = "list"
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileObject(_Object):
    """A file of `/v1/files`; times are epoch seconds."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    status_details: None


class FileList(_Page):
    data: list[FileObject]


class DeletedFile(_Object):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True]


class BatchErrorObject(_Object):
    """What is wrong with a line of the input file."""

    code: str
    line: int | None
    message: str
    param: str | None


class BatchErrorList(_Object):
    object: Literal["list"] = "list"
    data: list[BatchErrorObject]


class RequestCounts(_Object):
    """Lines of the input file."""

    total: int
    completed: int
    failed: int


class BatchObject(_Object):
    """A batch; times are epoch seconds."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrorList | None
    input_file_id: str
    completion_window: Literal["24h"]
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str]


class BatchList(_Page):
    data: list[BatchObject]


class VideoErrorObject(_Object):
    """Why a video failed."""

    code: str
    message: str
    param: str | None


class VideoObject(_Object):
    """A video; times are epoch seconds."""

    id: str = Field(examples=["video_01ja3v5c8zq3m7x2r4t6w8y0ab"])
    object: Literal["video"] = "video"
    model: str
    status: Literal["queued", "in_progress", "completed", "failed"]
    progress: int = Field(ge=0, le=100)
    created_at: int
    completed_at: int | None
    expires_at: int | None
    prompt: str
    seconds: str
    size: str
    seed: int
    remixed_from_video_id: str | None
    error: VideoErrorObject | None
    warnings: list[FieldWarning]


class VideoList(_Page):
    data: list[VideoObject]


class DeletedVideo(_Object):
    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: Literal[True]
