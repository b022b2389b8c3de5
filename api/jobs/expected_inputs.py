"""Inputs that are artifacts of jobs that have not ended: what they will be follows from those jobs."""

from shared.artifact_ref import ArtifactRef
from shared.errors import InputRejected
from shared.inputs.validation import MAX_VIDEO_PIXELS
from shared.job import InputRef, Job
from shared.tasks import OutputFormat


def artifact_kind(job: Job) -> str:
    """Return the kind of the artifacts that a job makes."""
    return "latents" if job.output_format is OutputFormat.LATENT else job.task.medium.value


def check_is_made(ref: ArtifactRef, job: Job, param: str) -> None:
    """Raise `InputRejected` naming `param` unless an unfinished job will have the artifact, and it will be stored."""
    count = job.n * max(1, job.layers)
    if ref.artifact >= count:
        message = f"{param}: job {job.id} makes {count} artifacts; artifact is at most {count - 1}, not {ref.artifact}"
        raise InputRejected(message, param=param)
    if job.output is not None:
        message = f"{param}: the results of job {job.id} are not stored here, as it has an output"
        raise InputRejected(f"{message}; submit it without one, or wait and send a URL", param=param)


def expected_input(ref: ArtifactRef, job: Job, latent_scale: int) -> InputRef:
    """Return the input that an artifact of an unfinished job will be.

    A side of latents has a value for each `latent_scale` pixels.
    """
    is_latent = job.output_format is OutputFormat.LATENT
    video, audio = job.task.makes_video, job.task.makes_audio
    unit = latent_scale if is_latent else 1
    step = 2 if video else 1  # the encoder drops the last row or column of odd sides
    return InputRef(
        id="",
        key="",
        content_type=job.output_format.content_type,
        bytes=0,
        width=job.width // unit // step * step,
        height=job.height // unit // step * step,
        frames=job.frames if video else 0,
        fps=float(job.fps or 1) if video else None,
        duration_s=job.duration_s if audio else None,
        source=ref,
    )


def check_pixels(ref: InputRef, max_pixels: int, param: str) -> None:
    """Raise `InputRejected` for an image or a video that no job may start from."""
    most = MAX_VIDEO_PIXELS if ref.is_video else max_pixels
    if ref.width * ref.height > most:
        message = f"{param}: it will have {ref.width}x{ref.height} pixels; at most {most} are allowed"
        raise InputRejected(message, param=param)
