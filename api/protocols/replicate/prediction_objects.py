"""Schemas of Replicate's objects, for the OpenAPI document: their routes build them as plain JSON."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Object(BaseModel):
    model_config = ConfigDict(json_schema_serialization_defaults_required=True)


class PredictionUrls(_Object):
    get: str
    cancel: str
    stream: str


class PredictionObject(_Object):
    """A job as a prediction; times are ISO 8601."""

    id: str
    model: str
    version: str
    status: Literal["starting", "processing", "succeeded", "failed", "canceled"]
    input: dict[str, Any]
    output: list[str] | str | None = Field(description="URLs of the images, or of the video.")
    logs: str
    error: Any
    metrics: dict[str, Any]
    data_removed: bool
    source: str
    created_at: str
    started_at: str | None
    completed_at: str | None
    urls: PredictionUrls


class PredictionList(_Object):
    """A page of predictions; `next` is the URL of the next one."""

    previous: str | None
    next: str | None
    results: list[PredictionObject]


class ReplicateFileUrls(_Object):
    get: str


class ReplicateFile(_Object):
    """An uploaded input image."""

    id: str
    name: str
    content_type: str
    size: int
    etag: str
    checksums: dict[str, str]
    metadata: dict[str, Any]
    created_at: str
    expires_at: str | None
    urls: ReplicateFileUrls


class ReplicateVersion(_Object):
    """The served version of a model, with the schema of its input and output."""

    id: str
    created_at: str
    cog_version: str
    openapi_schema: dict[str, Any]


class ReplicateModel(_Object):
    """A served model."""

    url: str
    owner: str
    name: str
    description: str
    visibility: str
    run_count: int
    latest_version: ReplicateVersion


class ReplicateModelList(_Object):
    previous: None
    next: None
    results: list[ReplicateModel]


class ReplicateVersionList(_Object):
    previous: None
    next: None
    results: list[ReplicateVersion]
