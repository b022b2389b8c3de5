"""Batches, each a file of requests that become jobs, and the files that they read and write. Pure state."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict

CHUNK_LINES = 500
"""Lines that one step submits at most."""


class BatchStatus(StrEnum):
    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        return self in (BatchStatus.FAILED, BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED)


class BatchError(BaseModel):
    """Why an input file is rejected or a batch given up; `line` counts from 1, None: the file as a whole."""

    model_config = ConfigDict(frozen=True)

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Batch(BaseModel):
    """State of a batch; times in milliseconds, None: not yet.

    Of `total` non-blank lines, the first `read` were processed: `accepted` became jobs, of which `ended` have ended.
    The jobs of the first `canceled` lines were canceled; of a batch that is given up, only those after `read`. The
    results of the first `written` lines were written, `succeeded` of them successful. `read_offset` and
    `written_offset` are byte offsets in the input file. `rev` counts the committed updates. `signs_urls` if its creator
    needs a key: URLs in the output need none. With `errors`, a batch that runs is given up: its other lines are not
    submitted. Since its last progress, `step_failures` steps have failed for the same reason, `step_failure`.
    `lacks_error_file` if a batch has ended without a line in its error file.
    """

    model_config = ConfigDict(frozen=True)

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    output_file_id: str
    error_file_id: str
    base_url: str
    created_at_ms: int
    expires_at_ms: int
    output_expires_after_s: int | None = None
    signs_urls: bool = False
    metadata: dict[str, str] = {}
    status: BatchStatus = BatchStatus.VALIDATING
    final_status: BatchStatus = BatchStatus.COMPLETED
    rev: int = 0
    total: int = 0
    read: int = 0
    read_offset: int = 0
    accepted: int = 0
    ended: int = 0
    completed: int = 0
    failed: int = 0
    canceled: int = 0
    lacks_error_file: bool = False
    written: int = 0
    written_offset: int = 0
    succeeded: int = 0
    errors: tuple[BatchError, ...] = ()
    step_failures: int = 0
    step_failure: str = ""
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None

    @property
    def possibly_submitted(self) -> int:
        """Lines that can be jobs, including a chunk that was submitted without being committed."""
        return min(self.total, self.read + CHUNK_LINES)

    @property
    def uncanceled(self) -> int:
        """Lines before the next one whose job is to be canceled: a batch that is given up keeps those it has read."""
        return self.canceled if self.status is BatchStatus.CANCELLING else max(self.canceled, self.read)

    @property
    def last_line(self) -> int:
        """The last line that gets a result or an error; those after it were not submitted before it was given up."""
        return self.read if self.errors else self.total

    @property
    def has_output(self) -> bool:
        """Whether an ended batch has an output file."""
        return self.succeeded > 0

    @property
    def has_errors(self) -> bool:
        """Whether an ended batch has an error file: each line has a result or an error, unless it was given up."""
        return self.succeeded < self.total and not self.lacks_error_file

    @property
    def open_jobs(self) -> int:
        """Jobs that have not ended; at least 0, as a job can end before its line is committed."""
        return max(0, self.accepted - self.ended)


@dataclass(frozen=True)
class Part:
    """One stored object of a file; `name` is relative to the file's prefix."""

    name: str
    bytes: int


class File(BaseModel):
    """Metadata of a file. `live` counts the running batches that read it."""

    model_config = ConfigDict(frozen=True)

    id: str
    tenant: str
    filename: str
    purpose: Literal["batch", "batch_output"]
    bytes: int
    created_at_ms: int
    expires_at_ms: int
    live: int = 0


def file_prefix(tenant: str, file_id: str) -> str:
    """Return the storage prefix of a file's parts."""
    return f"files/{tenant}/{file_id}/"
