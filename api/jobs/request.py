"""The request for a job: the body that clients send, its parsing, and its task. `job_builder` builds the job."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from shared.artifact_ref import InputSource
from shared.config.adapters import MAX_ADAPTERS, AdapterChoice
from shared.config.controls import MAX_CONTROLS, ControlChoice
from shared.config.destinations import DestinationChoice
from shared.config.model_spec import ModelSpec
from shared.config.request_limits import MAX_INPUT_IMAGES
from shared.errors import MAX_FAULTS, Faults, InvalidRequest, first_of
from shared.job_fields import MESSAGES, CallFields, ChoosableFields, ConvertedFields, PipelineFields, ServiceFields
from shared.tasks import Task
from shared.webhooks import JobEventName

Body = TypeVar("Body", bound=BaseModel)
_WITH_IMAGE = (Task.IMAGE_TO_IMAGE, Task.EDIT, Task.UPSCALE, Task.IMAGE_TO_VIDEO, Task.IMAGE_TO_MESH)
_WITH_SEVERAL = (Task.EDIT, Task.IMAGE_TO_MESH)
_FROM_TEXT = (Task.TEXT_TO_IMAGE, Task.TEXT_TO_VIDEO, Task.TEXT_TO_AUDIO)


class JobRequest(ConvertedFields, ServiceFields, CallFields, ChoosableFields, PipelineFields):
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

    # `api.jobs.model_limits` checks which jobs need one: forms send an empty text for a field that is left out.
    prompt: str = Field(
        "",
        max_length=100_000,
        description="What the image or video shows, or what is to be heard. Needed, except by models of meshes, "
        "which take none, by jobs with a control of kind `redux`, and to upscale an image or a video.",
    )
    adapters: tuple[AdapterChoice, ...] = Field((), max_length=MAX_ADAPTERS, description="LoRA adapters to apply.")
    image: InputSource | None = Field(
        None,
        description="Start from this image: an id of `POST /v1/inputs`, a job's id for its first image, an object of "
        "`job` and the index of its `artifact`, the URL of an artifact, a data URL or an https URL. A job "
        "that has not ended is waited for.",
    )
    images: tuple[InputSource, ...] | None = Field(
        None,
        min_length=1,
        max_length=MAX_INPUT_IMAGES,
        description="Several images, instead of `image`: to edit, or the front, left, back and right of an object.",
    )
    mask: InputSource | None = Field(
        None,
        description="Repaint `image` where this is white; if part of it is transparent, where it is transparent. "
        "Same proportions as `image`.",
    )
    last_image: InputSource | None = Field(None, description="Last frame of a video that starts from `image`.")
    video: InputSource | None = Field(
        None,
        description="Change this video, go on from it, upscale it, or let the person of `image` move as in it: an MP4 "
        "or MOV, named like `image`.",
    )
    face_video: InputSource | None = Field(
        None,
        description="Faces that the person of `image` is to have, frame by frame, for models whose `video` is one of "
        "poses. Named like `video`.",
    )
    audio: InputSource | None = Field(
        None, description="Start from this sound: named as `image`, of a WAV, FLAC, MP3, or Ogg (Opus, Vorbis) file."
    )
    controls: tuple[ControlChoice, ...] = Field(
        (), max_length=MAX_CONTROLS, description="Images that guide the result, through control nets or an IP-Adapter."
    )
    output: DestinationChoice | None = Field(
        None, description="Where the results go. Unset: they are stored here and deleted with the job."
    )
    webhook_events: tuple[JobEventName, ...] | None = Field(
        None, min_length=1, description="Events sent to `webhook`. Unset: those that end the job."
    )

    @property
    def image_values(self) -> dict[str, InputSource]:
        """Values of `image` or `images`, by field path."""
        if self.image is not None:
            return {"image": self.image}
        return {f"images.{index}": value for index, value in enumerate(self.images or ())}

    @property
    def repaints_audio(self) -> bool:
        return self.repaint_start_s is not None or self.repaint_end_s is not None

    @property
    def fetches_adapters(self) -> bool:
        """Whether an adapter is named by URL or on the hub."""
        return any(adapter.is_fetched for adapter in self.adapters)

    @property
    def references(self) -> dict[str, InputSource]:
        """Values of all fields that name an image, a video or a sound, by field path."""
        names = ("mask", "last_image", "video", "face_video", "audio")
        others = {name: getattr(self, name) for name in names}
        controls = {f"controls.{index}.image": control.image for index, control in enumerate(self.controls)}
        return self.image_values | {name: value for name, value in others.items() if value is not None} | controls


def parse(body: Any) -> JobRequest:
    """Validate a decoded JSON body, or raise `InvalidRequest` that names all invalid fields."""
    return validated(JobRequest, body)


def validated(model: type[Body], body: Any) -> Body:
    """Validate a decoded JSON body of any model, or raise `InvalidRequest` that names all invalid fields."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise first_of([_fault(details) for details in error.errors()[:MAX_FAULTS]]) from error


def valid_fields(
    model: type[Body], values: Mapping[str, Any], faults: Faults, required: Mapping[str, Any] | None = None
) -> Body:
    """Return a model of the valid fields of `values`, and collect the faults of the others.

    Fields without a default are `required`: the values that stand in for those that are missing or invalid.
    """
    try:
        return validated(model, values)
    except InvalidRequest as error:
        faults.found += error.faults
        invalid = {(fault.param or "").partition(".")[0] for fault in error.faults}
    valid = {name: value for name, value in values.items() if name not in invalid and name in model.model_fields}
    return validated(model, {**(required or {}), **valid})


def _fault(details: ErrorDetails) -> InvalidRequest:
    param = ".".join(str(part) for part in details["loc"] if part != "[key]").rstrip(".") or None
    return InvalidRequest(f"{param or 'body'}: {MESSAGES.get(details['type'], details['msg'])}", param=param)


def task_of(request: JobRequest, spec: ModelSpec) -> Task:
    """Return the request's task, or raise `InvalidRequest` that names the field that does not match it.

    A mask implies inpainting. A video implies changing, extending or upscaling it, or animating an image. Otherwise the
    images, `last_image`, `strength` and `frames` select among the model's tasks; if more than one remains, the request
    must name its task.
    """
    if request.image is not None and request.images is not None:
        raise InvalidRequest("images: send either image or images, not both", param="images")
    if request.task is not None:
        if request.task not in spec.tasks:
            raise _unsupported(spec, request.task.value, "task")
        _check_fields(request, request.task)
        return request.task
    matching = [task for task in _implied(request) if task in spec.tasks]
    if request.strength is not None:
        matching = [task for task in matching if task.has_strength] or matching
    if len(matching) > 1:
        raise InvalidRequest(f"task: ambiguous; send one of {_names(matching)}", param="task")
    if not matching:
        raise _no_match(request, spec)
    _check_fields(request, matching[0])
    return matching[0]


def _implied(request: JobRequest) -> Sequence[Task]:
    """Return the tasks that the fields sent allow, whatever the model."""
    if request.mask is not None:
        return (Task.INPAINT,)
    if request.repaints_audio:
        return (Task.AUDIO_INPAINT,)
    if request.audio is not None:
        return (Task.AUDIO_TO_AUDIO,)
    if request.video is not None:
        if request.image_values:
            return (Task.ANIMATE,)
        return (Task.VIDEO_TO_VIDEO, Task.EXTEND_VIDEO, Task.UPSCALE_VIDEO)
    tasks: Sequence[Task] = _WITH_IMAGE if request.image_values or request.last_image is not None else _FROM_TEXT
    if len(request.image_values) > 1:
        tasks = _WITH_SEVERAL
    if request.last_image is not None:
        tasks = (Task.IMAGE_TO_VIDEO,)
    if request.strength is not None and Task.IMAGE_TO_IMAGE in tasks:
        tasks = (Task.IMAGE_TO_IMAGE,)
    if request.frames is not None and any(task.makes_video for task in tasks):
        tasks = [task for task in tasks if task.makes_video]
    if request.duration_s is not None and any(task.makes_audio for task in tasks):
        tasks = [task for task in tasks if task.makes_audio]
    return tasks


def _no_match(request: JobRequest, spec: ModelSpec) -> InvalidRequest:
    """Return the error for a request that matches no task of the model; it names the field that excluded the rest."""
    implied = _implied(request)
    if not request.image_values:
        for param in ("mask", "last_image"):
            if getattr(request, param) is not None:
                return InvalidRequest(f"{param} needs an image", param=param)
        if request.audio is None and request.repaints_audio:
            return InvalidRequest(f"{_repaint_field(request)} needs audio", param=_repaint_field(request))
        if request.audio is None and all(task.takes_audio for task in spec.tasks):
            return InvalidRequest(f"audio: model {spec.id!r} needs one; its tasks: {_names(spec.tasks)}", param="audio")
        if request.video is None and not any(task in _FROM_TEXT or not task.takes_image for task in spec.tasks):
            return InvalidRequest(f"image: model {spec.id!r} needs one; its tasks: {_names(spec.tasks)}", param="image")
    if request.video is None and all(task.takes_video for task in spec.tasks):
        return InvalidRequest(f"video: model {spec.id!r} needs one; its tasks: {_names(spec.tasks)}", param="video")
    decisive = {
        "mask": request.mask is not None,
        _repaint_field(request): request.repaints_audio,
        "audio": request.audio is not None,
        "video": request.video is not None,
        "last_image": request.last_image is not None,
        "strength": request.strength is not None and Task.IMAGE_TO_IMAGE in implied,
        "frames": request.frames is not None,
        "duration_s": request.duration_s is not None,
    }
    param = next((name for name, is_sent in decisive.items() if is_sent), _image_field(request))
    return _unsupported(spec, " or ".join(task.value for task in implied), param)


def _check_fields(request: JobRequest, task: Task) -> None:
    """Raise `InvalidRequest` naming the first field that `task` does not use or lacks."""
    count, field = len(request.image_values), _image_field(request)
    _check_audio(request, task)
    if count and not task.takes_image:
        raise InvalidRequest(f"{task.value} takes no images", param=field)
    if task.takes_image and not count:
        raise InvalidRequest(f"image: {task.value} needs one", param="image")
    if (request.video is not None) != task.takes_video:
        verb = "needs a video" if request.video is None else "takes no video"
        raise InvalidRequest(f"{task.value} {verb}", param="video")
    if count > 1 and task not in _WITH_SEVERAL:
        raise InvalidRequest(f"{task.value} takes one image, not {count}", param=field)
    if (request.mask is not None) != (task is Task.INPAINT):
        verb = "needs a mask" if request.mask is None else "takes no mask"
        raise InvalidRequest(f"{task.value} {verb}", param="mask")
    if request.face_video is not None and task is not Task.ANIMATE:
        raise InvalidRequest(f"{task.value} takes no face_video", param="face_video")
    if request.last_image is not None and task is not Task.IMAGE_TO_VIDEO:
        raise InvalidRequest(f"{task.value} takes no last_image", param="last_image")
    if request.strength is not None and not task.has_strength:
        start = "a sound" if task.makes_audio else "an image"
        reason = f"needs {start} to start from" if task in _FROM_TEXT else f"has no effect on {task.value}"
        raise InvalidRequest(f"strength {reason}", param="strength")
    if request.frames is not None and not task.makes_video:
        raise InvalidRequest(f"{task.value} makes no video", param="frames")


def _check_audio(request: JobRequest, task: Task) -> None:
    """Raise `InvalidRequest` naming the first field of sounds that `task` does not use or lacks."""
    if request.audio is not None and not task.takes_audio:
        raise InvalidRequest(f"{task.value} takes no audio", param="audio")
    if request.audio is None and task.takes_audio:
        raise InvalidRequest(f"audio: {task.value} needs one", param="audio")
    if request.repaints_audio != (task is Task.AUDIO_INPAINT):
        verb = "takes none" if request.repaints_audio else "needs one, or a repaint_end_s"
        raise InvalidRequest(f"{_repaint_field(request)}: {task.value} {verb}", param=_repaint_field(request))
    if request.duration_s is not None and not task.makes_audio:
        raise InvalidRequest(f"{task.value} makes no sound", param="duration_s")


def _repaint_field(request: JobRequest) -> str:
    only_end = request.repaint_start_s is None and request.repaint_end_s is not None
    return "repaint_end_s" if only_end else "repaint_start_s"


def _image_field(request: JobRequest) -> str:
    return "images" if request.images is not None else "image"


def _unsupported(spec: ModelSpec, task: str, param: str) -> InvalidRequest:
    return InvalidRequest(f"model {spec.id!r} does not support {task}; its tasks: {_names(spec.tasks)}", param=param)


def _names(tasks: Sequence[Task]) -> str:
    return ", ".join(task.value for task in tasks)
