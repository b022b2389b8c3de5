"""What leaves the engine: images, videos, sounds, meshes and latents, as arrays of the host."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]  # [height, width, 3 or 4] of an image, [frames, height, width, 3] of a video


@dataclass(frozen=True)
class Audio:
    """A sound, or that of a video: `samples` [channels, samples] of -1 to 1, `rate` in Hz."""

    samples: npt.NDArray[np.float32]
    rate: int

    @property
    def duration_s(self) -> float:
        return round(int(self.samples.shape[-1]) / self.rate, 3)

    @property
    def nbytes(self) -> int:
        return self.samples.nbytes


@dataclass(frozen=True)
class Output:
    """A finished image, or a video with its audio; `flagged` by the model's safety checker.

    One of a job with candidates has its number among these, and the `score` by which it was kept.
    """

    pixels: Pixels
    flagged: bool = False
    audio: Audio | None = None
    candidate: int | None = None
    score: float | None = None

    @property
    def is_video(self) -> bool:
        return self.pixels.ndim == 4

    @property
    def nbytes(self) -> int:
        return self.pixels.nbytes + (0 if self.audio is None else self.audio.nbytes)


@dataclass(frozen=True)
class Latents:
    """An image that is not decoded: the values of a tensor of `shape` as bytes, in a type as safetensors names it."""

    dtype: str
    shape: tuple[int, ...]
    values: bytes

    @property
    def nbytes(self) -> int:
        return len(self.values)


@dataclass(frozen=True)
class Mesh:
    """A finished mesh: `vertices` [n, 3], and `faces` [m, 3] of indexes of vertices, counter-clockwise from outside."""

    vertices: npt.NDArray[np.float32]
    faces: npt.NDArray[np.uint32]

    @property
    def nbytes(self) -> int:
        return self.vertices.nbytes + self.faces.nbytes
