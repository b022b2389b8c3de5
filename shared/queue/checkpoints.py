"""What a job's record says of its checkpoint: the stored files from which its images continue."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, ValidationError


class StoredImage(BaseModel):
    """The file of one image: `key` in storage, its size and SHA-256, and the step after which the image continues.

    `total` are all steps of the image; an earlier version wrote none.
    """

    model_config = ConfigDict(frozen=True)

    key: str
    bytes: int
    sha256: str
    step: int
    total: int = 0

    @property
    def left(self) -> float:
        """The part of its steps that is left."""
        return (self.total - self.step) / self.total if self.total else 1.0


class JobCheckpoint(BaseModel):
    """The files of a job's images; None for an image that begins anew."""

    model_config = ConfigDict(frozen=True)

    images: tuple[StoredImage | None, ...] = ()

    @classmethod
    def parsed(cls, text: str) -> JobCheckpoint | None:
        """Return a checkpoint from its text; None without one, or if another version has written it."""
        if not text:
            return None
        try:
            return cls.model_validate_json(text)
        except ValidationError:
            return None

    @property
    def stored(self) -> tuple[StoredImage, ...]:
        return tuple(image for image in self.images if image is not None)

    @property
    def bytes(self) -> int:
        return sum(image.bytes for image in self.stored)

    @property
    def step(self) -> int:
        """Steps of all images that need not be computed again."""
        return sum(image.step for image in self.stored)

    @property
    def left(self) -> float:
        """The part of the job's steps that is left, as far as the image with most: its images run together.

        At least one step, as what follows the last one is left, too. A dropped candidate has none.
        """
        one_step = 1 / max((1, *(image.total for image in self.stored)))
        return max((one_step, *(1.0 if image is None else image.left for image in self.images)))

    def wire(self) -> str:
        return self.model_dump_json()

    def size(self) -> str:
        """Return what it adds to the footprint of its job, as `footprint.lua` has it."""
        return f"0,{len(self.wire())},{len(self.stored)},{self.bytes}"


def checkpoint_prefix(job_id: str) -> str:
    """Return the prefix of all files of a job's checkpoints: below that of the job, and of no claim's artifacts."""
    return f"jobs/{job_id}/checkpoints/"


def checkpoint_key(job_id: str, epoch: int, number: int, image: int) -> str:
    """Return the key of the file of an image in the checkpoint with this number of a claim."""
    return f"{checkpoint_prefix(job_id)}{epoch}-{number}-{image}.safetensors"
