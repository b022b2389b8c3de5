"""Jobs: requests with all defaults resolved, the seed included, and their wire form.

A `Job` is immutable; `JobRecord` has its changing state. Until it is claimed, a job can be replaced by one with another
priority or time limit.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shared.artifact_ref import ArtifactRef
from shared.config.adapters import Adapter
from shared.config.controls import Control
from shared.config.destinations import Destination
from shared.config.step_schedules import computed_steps
from shared.job_fields import (
    MAY_DIFFER,
    MUST_MATCH,
    PARTS,
    CallFields,
    ChosenFields,
    Matching,
    PipelineFields,
    ServiceFields,
)
from shared.runtime.tracing import TraceContext
from shared.tasks import LATENTS_TYPE, VIDEO_TYPES

QUEUE_SCHEMA = 2
"""Version of the queue's keys and fields in Redis; a program refuses to start on any other."""

JOB_FORM = 3
"""Wire form of a job, its `schema_version`: the latest that this program reads. Workers release jobs of a later one.

Fields at their default are not written, so that older programs, which refuse fields that they do not know, can read
jobs without the new ones. Another default for a field raises the form. `tests/unit/shared/wire_forms.json` has each
form as it was recorded.
"""


class State(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELED = "canceled"
    EXPIRED = "expired"

    @property
    def terminal(self) -> bool:
        return self not in (State.QUEUED, State.RUNNING)


class Phase(StrEnum):
    """Phase of a running job."""

    LOADING = "loading"
    DENOISING = "denoising"
    DECODING = "decoding"
    UPLOADING = "uploading"


class Frozen(BaseModel):
    """A part of a job or of its record."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_by_name=True, serialize_by_alias=True)


class Webhook(Frozen):
    """A webhook of one job, sent on the given `states`.

    With `version`, a model version, it is sent as a Replicate prediction.
    """

    url: str
    states: tuple[State, ...]
    version: str | None = None


class InputRef(Frozen):
    """A validated and stored input image or video, or latents, of which the sides are their own; or a sound, without
    sides.

    Its id is derived from its content. Videos have `frames`, and `fps`, their mean rate, and maybe `hidden_frames`,
    which are decoded and not shown; these are omitted without any, so that older programs can read the rest.

    An artifact of a job that had not ended has a `source` instead of an id and a key, and no bytes; the rest is what it
    will be. A worker that claims the job reads it then. An input that is a copy of an artifact names it in `copy_of`.
    """

    id: str
    key: str
    content_type: str
    bytes: int
    width: int
    height: int
    frames: Annotated[int, Field(exclude_if=lambda frames: not frames)] = 0
    fps: Annotated[float | None, Field(exclude_if=lambda fps: fps is None)] = None
    hidden_frames: Annotated[int, Field(exclude_if=lambda frames: not frames)] = 0
    duration_s: Annotated[float | None, Field(exclude_if=lambda duration_s: duration_s is None)] = None
    source: Annotated[ArtifactRef | None, Field(exclude_if=lambda source: source is None)] = None
    copy_of: Annotated[ArtifactRef | None, Field(exclude_if=lambda copy_of: copy_of is None)] = None

    @property
    def is_latents(self) -> bool:
        return self.content_type == LATENTS_TYPE

    @property
    def is_video(self) -> bool:
        return self.content_type in VIDEO_TYPES

    @property
    def is_audio(self) -> bool:
        return self.content_type.startswith("audio/")

    @property
    def kind(self) -> Literal["image", "video", "audio", "latents"]:
        if self.is_audio:
            return "audio"
        return "video" if self.is_video else "latents" if self.is_latents else "image"


class Job(ServiceFields, CallFields, ChosenFields, PipelineFields, Frozen):
    """A validated request with all defaults resolved; `created_at_ms` is in ms since the epoch.

    Every field is marked: it must match in all jobs of a signature, or may differ. An unmarked field must match: a
    forgotten mark costs speed but not correctness. The fields that `mixed_fields` names may differ in a forward of the
    model; the signature omits them.

    `images` are the image to start from or those to edit, `video` the one to change or to follow, and `face_video` has
    the faces to follow with it. `reference_sizes` are the (width, height) that images to edit are resized to, empty for
    other tasks. `control_images` are the images of `controls`, in their order.
    `time_limit_ms` counts from the job's queueing, because clocks of two machines differ; Redis sets the deadline. That
    of a job for later counts from `not_before_ms`.
    `trace` is the span of its submission, if traces are on. `previews` are those of each image, for clients that wait.
    """

    schema_version: Annotated[Literal[3], MAY_DIFFER] = 3
    id: Annotated[str, MAY_DIFFER]
    tenant: Annotated[str, MAY_DIFFER]
    created_at_ms: Annotated[int, MAY_DIFFER]
    time_limit_ms: Annotated[int | None, MAY_DIFFER, Field(alias="deadline_ms")] = None  # its name in form 3
    not_before_ms: Annotated[int | None, MAY_DIFFER] = None
    webhook: Annotated[Webhook | None, MAY_DIFFER] = None
    output: Annotated[Destination | None, MAY_DIFFER] = None
    trace: Annotated[TraceContext | None, MAY_DIFFER] = None
    reference_sizes: Annotated[tuple[tuple[int, int], ...], MUST_MATCH] = ()
    adapters: Annotated[tuple[Adapter, ...], MUST_MATCH] = ()
    control_ids: Annotated[tuple[str, ...], MUST_MATCH] = ()
    mixed_fields: Annotated[tuple[str, ...], MUST_MATCH] = ()
    images: Annotated[tuple[InputRef, ...], MAY_DIFFER] = ()
    mask: Annotated[InputRef | None, MAY_DIFFER] = None
    last_image: Annotated[InputRef | None, MAY_DIFFER] = None
    video: Annotated[InputRef | None, MAY_DIFFER] = None
    face_video: Annotated[InputRef | None, MAY_DIFFER] = None
    audio: Annotated[InputRef | None, MAY_DIFFER] = None
    controls: Annotated[tuple[Control, ...], MAY_DIFFER] = ()
    control_images: Annotated[tuple[InputRef, ...], MAY_DIFFER] = ()
    previews: Annotated[int, MAY_DIFFER] = 0

    @property
    def slots(self) -> int:
        """Slots of a batch that the job takes, one per image: of candidates as many as begin."""
        return self.n if self.best_of is None else self.best_of.candidates

    @property
    def computed_steps_per_image(self) -> int:
        """How many denoising steps are computed for each image, at least; of candidates on average.

        Of a part of the denoising one: which steps are in it depends on the noise scheduler.
        """
        if any(getattr(self, name) is not None for name in PARTS):
            return 1
        steps = int(self.steps * (self.strength or 1.0))
        computed = len(computed_steps(steps, self.step_cache))
        if self.best_of is not None and steps > 0:
            computed = int(computed * self.best_of.mean_steps(steps) / steps)
        return max(1, computed)

    def seed_of(self, index: int) -> int:
        """Return the seed of output `index`; layers of one result share it."""
        return self.seed + index // max(1, self.layers)

    @property
    def inputs(self) -> dict[str, InputRef]:
        """Stored input images, video and sound, by request field."""
        several = len(self.images) > 1
        images = {f"images.{index}" if several else "image": ref for index, ref in enumerate(self.images)}
        names = ("mask", "last_image", "video", "face_video", "audio")
        others = {name: getattr(self, name) for name in names}
        of_controls = {f"controls.{index}.image": ref for index, ref in enumerate(self.control_images)}
        return images | {name: ref for name, ref in others.items() if ref is not None} | of_controls

    @property
    def sources(self) -> tuple[str, ...]:
        """Ids of the jobs that had not ended and from whose artifacts this one starts."""
        return tuple(dict.fromkeys(ref.source.job for ref in self.inputs.values() if ref.source is not None))

    @property
    def parents(self) -> tuple[str, ...]:
        """Ids of the jobs that are to end before this one is queued."""
        return tuple(dict.fromkeys((*self.after, *self.sources)))

    @property
    def ended_sources(self) -> tuple[str, ...]:
        """Ids of the jobs that had ended and from copies of whose artifacts this one starts."""
        return tuple(dict.fromkeys(ref.copy_of.job for ref in self.inputs.values() if ref.copy_of is not None))

    @property
    def predecessors(self) -> tuple[str, ...]:
        """Ids of the jobs that come before this one in a graph: it is a child of each."""
        return tuple(dict.fromkeys((*self.parents, *self.ended_sources)))


def matching(name: str) -> Matching:
    """Return the mark of a `Job` field."""
    return next((mark for mark in Job.model_fields[name].metadata if isinstance(mark, Matching)), MUST_MATCH)


def encode(job: Job) -> str:
    """Return the wire form of a job: JSON that names its form."""
    set_fields = job.model_dump_json(exclude_defaults=True)
    return f'{{"schema_version":{job.schema_version},{set_fields[1:]}'  # a default itself


_UNKNOWN = frozenset(
    {
        *("extra_forbidden", "enum", "literal_error", "string_pattern_mismatch"),
        *("less_than_equal", "greater_than_equal", "greater_than", "too_long", "string_too_long", "string_too_short"),
    }
)
"""Pydantic's errors for fields and values that a model does not have, and for those beyond its bounds."""


def is_newer(wire: str | bytes) -> bool:
    """Return whether a later program has written a job that `decode` rejects.

    Such a job has a later form, or is valid but for fields, values and bounds that this program does not know.
    """
    try:
        version = json.loads(wire).get("schema_version")
        if not isinstance(version, int) or version != JOB_FORM:
            return isinstance(version, int) and version > JOB_FORM
        decode(wire)
    except ValidationError as error:
        return all(fault["type"] in _UNKNOWN for fault in error.errors(include_url=False, include_context=False))
    except (ValueError, AttributeError, RecursionError):
        return False
    return False


def decode(wire: str | bytes) -> Job:
    """Parse the wire form of a job; raises `pydantic.ValidationError` (a `ValueError`) if it is invalid."""
    return Job.model_validate_json(wire)
