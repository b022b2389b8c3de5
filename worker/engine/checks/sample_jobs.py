"""Sample jobs of a model, for the self-check, the warm-up and the model probe."""

import io
import wave
from functools import lru_cache
from typing import NamedTuple

import av
import numpy as np
from PIL import Image

from shared.config.controls import Control, ControlSpec, structure_for
from shared.config.model_spec import ModelSpec
from shared.job import InputRef, Job
from shared.tasks import VIDEO_TYPES, Medium, Task
from worker.engine.protocol import InputFiles

# Two have the same words in another order, so the same length, for architectures that fuse only those.
PROMPTS = (
    "a lighthouse",
    "a very small red boat beside two lighthouses in the morning",
    "the sea, the rain and the snow, and the sea",
    "the sea, the snow and the rain, and the sea",
)


LEAST_RESOLUTION = 16
"""Of the volume of a mesh: 5,000 points instead of 57 million."""
VIDEO_SIDE = 64
"""Of the videos of sample jobs."""


class SampleSize(NamedTuple):
    """The size of a sample job; `frames` matter for a video, `duration_s` for a sound, which has no sides."""

    width: int
    height: int
    frames: int
    duration_s: float = 1.0


def default_size(spec: ModelSpec) -> SampleSize:
    return SampleSize(spec.defaults.width, spec.defaults.height, spec.usual_frames, spec.usual_duration_s)


def sample_sizes(spec: ModelSpec) -> tuple[SampleSize, ...]:
    """Return the sizes of sample jobs: the smallest allowed and, for pipelines that fail at that, the default."""
    if any(task.makes_mesh for task in spec.tasks):
        return (default_size(spec),)  # of the thumbnail only
    side = -(-spec.limits.min_side // spec.limits.multiple_of) * spec.limits.multiple_of
    default = default_size(spec)
    # One group of frames after the first frame, or as many as are allowed.
    few = min(max(spec.limits.frames_multiple + 1, spec.limits.min_frames), spec.limits.max_frames)
    small = SampleSize(side, side, few, spec.limits.min_duration_s)
    return tuple(dict.fromkeys((small, default._replace(frames=few), default)))


def sample_job(spec: ModelSpec, task: Task, at: int, prompt: str, size: SampleSize, *, last_image: bool = False) -> Job:
    """Return a job of two steps for one image or video of `spec`; `at` is its id and seed.

    With `last_image` a job that has an image has a last one too. A refiner does the second step. The model's image of
    structure is added where its task needs one.
    """
    defaults = spec.defaults
    width, height, frames, duration_s = size
    if task.makes_audio:
        width = height = 0
    ref = _sample_image(size)
    has_image = task.takes_image
    job = Job(
        id=f"sample-{at}",
        tenant="sample",
        created_at_ms=0,
        model=spec.id,
        width=width,
        height=height,
        frames=frames if task.makes_video else 1,
        fps=defaults.fps if task.makes_video else None,
        layers=defaults.layers if task.medium is Medium.IMAGE else 0,
        duration_s=duration_s if task.makes_audio else None,
        lyrics="la la la" if task.makes_audio else None,
        audio=_sample_audio(duration_s) if task.takes_audio else None,
        repaint_end_s=duration_s / 2 if task is Task.AUDIO_INPAINT else None,
        reference_sizes=(spec.references.size_for(width, height),) if task is Task.EDIT else (),
        task=task,
        prompt=prompt,
        seed=at,
        steps=2,
        guidance_scale=defaults.guidance_scale,
        guidance_scale_2=defaults.guidance_scale_2,
        strength=1.0 if task.has_strength else None,
        refiner_start=0.5 if spec.refines(task) else None,
        images=(ref,) if has_image else (),
        last_image=ref if has_image and last_image else None,
        mask=ref if task is Task.INPAINT else None,
        video=_sample_video(1 if task is Task.EXTEND_VIDEO else frames, defaults.fps) if task.takes_video else None,
        face_video=_sample_video(frames, defaults.fps) if task is Task.ANIMATE else None,
        extra={"octree_resolution": LEAST_RESOLUTION} if task.makes_mesh else None,
    )
    structure = structure_for(task, spec.control)
    return job if structure is None else with_control(job, structure)


def with_control(job: Job, control: ControlSpec) -> Job:
    """Return a sample job with a control and without a refiner; each sample job has another scale."""
    chosen = Control(id=control.id, kind=control.kind, scale=1 / (1 + job.seed))
    image = _sample_image(SampleSize(job.width, job.height, 1))
    return job.model_copy(update={"controls": (chosen,), "control_images": (image,), "refiner_start": None})


def _sample_audio(duration_s: float) -> InputRef:
    return InputRef(id="sample", key="", content_type="audio/wav", bytes=0, width=0, height=0, duration_s=duration_s)


def _sample_image(size: SampleSize) -> InputRef:
    return InputRef(id="sample", key="", content_type="image/png", bytes=0, width=size.width, height=size.height)


def _sample_video(frames: int, fps: int) -> InputRef:
    video = InputRef(id="sample", key="", content_type=VIDEO_TYPES[0], bytes=0, width=VIDEO_SIDE, height=VIDEO_SIDE)
    return video.model_copy(update={"frames": frames, "fps": fps})


@lru_cache(4)
def _video_file(frames: int, fps: int) -> bytes:
    """Return an MP4 of a gradient that moves."""
    file, image = io.BytesIO(), Image.radial_gradient("L").resize((VIDEO_SIDE, VIDEO_SIDE)).convert("RGB")
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=fps, options={"preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt = VIDEO_SIDE, VIDEO_SIDE, "yuv420p"
        for at in range(frames):
            moved = image.rotate(0, translate=(at % VIDEO_SIDE, 0))
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.asarray(moved), format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def sample_files(job: Job) -> InputFiles:
    file = io.BytesIO()
    Image.radial_gradient("L").save(file, "PNG")
    data = file.getvalue()
    mask, last = (None if ref is None else data for ref in (job.mask, job.last_image))
    images, controls = ((data,) * len(refs) for refs in (job.images, job.control_images))
    video = None if job.video is None else _video_file(job.video.frames, job.fps or 1)
    audio = None if job.audio is None else _sample_tone(job)
    faces = None if job.face_video is None else _video_file(job.face_video.frames, job.fps or 1)
    return InputFiles(images, mask, last, controls, video, audio, faces)


def _sample_tone(job: Job) -> bytes:
    """Return a WAV file of a tone that rises over the length of a sample job."""
    rate, file = 16_000, io.BytesIO()
    at = np.arange(int((job.duration_s or 1.0) * rate)) / rate
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(rate)
        sound.writeframes((8000 * np.sin(2 * np.pi * (220 + 40 * at) * at)).astype("<i2").tobytes())
    return file.getvalue()
