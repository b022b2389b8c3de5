"""What the engine makes of one prompt: images or videos, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from PIL import Image

from shared.errors import FusequeueError
from shared.job import Job
from shared.job_record import BatchingStats, FieldWarning
from worker.engine.outputs import Audio, Latents, Mesh, Output
from worker.output.image_encoding import encode, encode_latents

StrPath: TypeAlias = str | Path
Kind = TypeVar("Kind")


@dataclass(frozen=True)
class _Shown(Generic[Kind]):
    """One output of a job, which becomes a file in the job's `output_format`."""

    output: Kind = field(repr=False)
    job: Job = field(repr=False)
    index: int = 0


class Video(_Shown[Output]):
    """A video, with its sound if the model makes one."""

    @property
    def frames(self) -> list[Image.Image]:
        return [Image.fromarray(frame) for frame in self.output.pixels]

    def mp4(self) -> bytes:
        from worker.output.video_encoding import encode_video  # FFmpeg's libraries take 5 MB

        return encode_video(self.output, self.job, self.index).data


class Sound(_Shown[Audio]):
    """A sound: `samples` [channels, samples] of -1 to 1, `rate` in Hz."""

    @property
    def samples(self) -> npt.NDArray[np.float32]:
        return self.output.samples

    @property
    def rate(self) -> int:
        return self.output.rate

    def file(self) -> bytes:
        """Return it in the job's `output_format`."""
        from worker.output.audio_encoding import encode_audio  # FFmpeg's libraries take 5 MB

        return encode_audio(self.output, self.job, self.index).data


class Shape(_Shown[Mesh]):
    """A mesh: `vertices` [count, 3] and the indexes of those of each triangle, `faces` [count, 3]."""

    @property
    def vertices(self) -> npt.NDArray[np.float32]:
        return self.output.vertices

    @property
    def faces(self) -> npt.NDArray[np.uint32]:
        return self.output.faces

    def glb(self) -> bytes:
        from worker.output.mesh_encoding import encode_mesh

        return encode_mesh(self.output, self.job, self.index).data


Made: TypeAlias = Image.Image | Video | Sound | Shape


@dataclass(frozen=True)
class Result:
    """Item `index` of the prompts: its images, videos, sounds, meshes or latents, or an `error`.

    `job` has every field with its default chosen, the seed too; None for an item whose fields are invalid.
    """

    index: int
    job: Job | None = None
    outputs: tuple[Output | Audio | Mesh | Latents, ...] = field(default=(), repr=False)
    error: FusequeueError | None = None
    warnings: tuple[FieldWarning, ...] = ()
    batching: BatchingStats = field(default_factory=BatchingStats, repr=False)
    device_seconds: float = 0.0

    def __repr__(self) -> str:
        """Return what it is in a line."""
        made = self.error or (f"{len(self.outputs)} output" + "s" * (len(self.outputs) != 1))
        of = "" if self.job is None else f"{self.job.model}, seed {self.job.seed}, "
        return f"<Result {self.index}: {of}{made}>"

    @property
    def images(self) -> list[Made]:
        """The images as those of Pillow, and the videos, sounds or meshes."""
        return [self._shown(at, output) for at, output in enumerate(self.outputs) if not isinstance(output, Latents)]

    def _shown(self, at: int, output: Output | Audio | Mesh) -> Made:
        if isinstance(output, Mesh):
            return Shape(output, self._job, at)
        if isinstance(output, Audio):
            return Sound(output, self._job, at)
        return Video(output, self._job, at) if output.is_video else Image.fromarray(output.pixels)

    @property
    def _job(self) -> Job:
        if self.job is None:
            raise ValueError(f"item {self.index} has no job: {self.error}")
        return self.job

    def files(self) -> list[bytes]:
        """Return the outputs as files in the job's `output_format`."""
        return [self._file(at, output) for at, output in enumerate(self.outputs)]

    def _file(self, at: int, output: Output | Audio | Mesh | Latents) -> bytes:
        if isinstance(output, Latents):
            return encode_latents(output, self._job, at)
        if isinstance(output, Mesh):
            return Shape(output, self._job, at).glb()
        if isinstance(output, Audio):
            return Sound(output, self._job, at).file()
        return Video(output, self._job, at).mp4() if output.is_video else encode(output.pixels, self._job, at)

    def save(self, folder: StrPath, name: str | None = None, *, overwrite: bool = False) -> list[Path]:
        """Write the outputs as `folder/name-index.ext`, and return the paths; `name` defaults to the item's number.

        Raises `FileExistsError` before the first is written if there is one of them, unless `overwrite` is set.
        """
        Path(folder).mkdir(parents=True, exist_ok=True)
        suffix = self._job.output_format.suffix if self.outputs else ""
        stem = f"{self.index:05}" if name is None else name
        paths = [Path(folder) / f"{stem}-{at}.{suffix}" for at in range(len(self.outputs))]
        taken = next((path for path in paths if path.exists()), None)
        if taken is not None and not overwrite:
            raise FileExistsError(f"{taken} exists; give another folder or name, or overwrite=True")
        for path, data in zip(paths, self.files(), strict=True):
            part = path.with_name(f".{path.name}.part")
            part.write_bytes(data)
            part.replace(path)
        return paths

    def _repr_png_(self) -> bytes | None:
        """Return the first image, which notebooks show."""
        first = next((image for image in self.images if isinstance(image, Image.Image)), None)
        if first is None:
            return None
        file = BytesIO()
        first.save(file, "PNG")
        return file.getvalue()


class GenerationFailed(FusequeueError, code="generation_failed"):
    """Some items have failed; `results` are those of all items, in order."""

    def __init__(self, results: Sequence[Result]) -> None:
        failed = [result for result in results if result.error is not None]
        first = failed[0]
        super().__init__(
            f"{len(failed)} of {len(results)} failed; item {first.index}: {first.error}; "
            "`results` of this error has the others"
        )
        self.results = tuple(results)
