"""Threads that decode the inputs of jobs: small images at once, large ones and videos in turns of their tenants."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import structlog

from shared.errors import InferenceFailed, InputRejected, JobError, UnexpectedError
from shared.inputs.validation import inspect
from worker.engine import thread_pools
from worker.engine.pipelines.input_images import InputImages, decode_inputs
from worker.engine.protocol import EngineRequest, InputFiles

log = structlog.get_logger()

# More pixels take more than half a second: 39 megapixels took 2 to 5 s and up to 850 MiB.
_MAX_SMALL_PIXELS = 8_000_000
PIXELS_PER_SECOND = 100_000  # of sound, which takes as long to decode
# Two also bound the memory.
_LARGE_THREADS = 2


@dataclass(frozen=True)
class DecodedInputs:
    """A request with its number by arrival, and its images or why they cannot be decoded."""

    request: EngineRequest
    arrival: int
    images: InputImages = field(default_factory=InputImages)
    error: JobError | None = None


class InputDecoder:
    """Decodes on its own threads. `done` gets the requests of one `submit` together, those with large images one by
    one; `is_wanted` says whether a job still runs."""

    def __init__(
        self, done: Callable[[list[DecodedInputs]], None], is_wanted: Callable[[str], bool], max_pixels: int
    ) -> None:
        self._done = done
        self._is_wanted = is_wanted
        self._max_pixels = max_pixels
        self._small = ThreadPoolExecutor(1, "decode-input")
        self._large = ThreadPoolExecutor(_LARGE_THREADS, "decode-large-input")
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[tuple[EngineRequest, int]]] = {}  # in the order of the tenants' turns

    def submit(self, numbered: list[tuple[EngineRequest, int]]) -> None:
        """Decode the images of requests; those without images are done on the calling thread if all are."""
        small = [item for item in numbered if not _is_large(item[0])]
        for item in numbered:
            if _is_large(item[0]):
                with self._lock:
                    self._waiting.setdefault(item[0].job.tenant, deque()).append(item)
                self._large.submit(self._decode_next)
        if all(request.inputs == InputFiles() for request, _ in small):
            if small:
                self._done([DecodedInputs(*item) for item in small])
        else:
            self._small.submit(lambda: self._done([self._decode(*item) for item in small]))

    def close(self) -> None:
        thread_pools.end(self._small, self._large)

    def _decode_next(self) -> None:
        """Decode the images of one request, of the tenant with the next turn."""
        with self._lock:
            tenant = next(iter(self._waiting))
            requests = self._waiting.pop(tenant)
            item = requests.popleft()
            if requests:
                self._waiting[tenant] = requests  # behind the others
        self._done([self._decode(*item)])

    def _decode(self, request: EngineRequest, arrival: int) -> DecodedInputs:
        rest = replace(request, inputs=InputFiles())  # a job does not keep its files: up to 80 MB
        if not self._is_wanted(request.claim_key):
            return DecodedInputs(rest, arrival)
        try:
            return DecodedInputs(rest, arrival, decode_inputs(request.job, self._checked(request.inputs)))
        except JobError as error:
            return DecodedInputs(rest, arrival, error=error)
        except Exception as error:  # the top of a thread: the job must end
            log.exception("inputs_not_decoded", job_id=request.job.id)
            return DecodedInputs(rest, arrival, error=UnexpectedError(error))

    def _checked(self, files: InputFiles) -> InputFiles:
        """Return the files as the decoders may see them, or raise `InferenceFailed`: a stored object can be damaged."""
        return InputFiles(
            images=tuple(self._checked_file(data, "image") for data in files.images),
            mask=None if files.mask is None else self._checked_file(files.mask, "mask"),
            last_image=None if files.last_image is None else self._checked_file(files.last_image, "last_image"),
            controls=tuple(self._checked_file(data, f"controls.{at}.image") for at, data in enumerate(files.controls)),
            video=None if files.video is None else self._checked_file(files.video, "video"),
            face_video=None if files.face_video is None else self._checked_file(files.face_video, "face_video"),
            audio=None if files.audio is None else self._checked_file(files.audio, "audio"),
        )

    def _checked_file(self, data: bytes, param: str) -> bytes:
        try:
            return inspect(data, max_bytes=len(data), max_pixels=self._max_pixels, param=param).data
        except InputRejected as error:
            message = f"the stored input cannot be decoded: {error.message}"
            raise InferenceFailed(message, param=param) from error


def _is_large(request: EngineRequest) -> bool:
    """Return whether a request takes long to decode. A video can: what its file says of its frames can be wrong."""
    if request.job.video is not None:
        return True
    pixels = sum(ref.width * ref.height for ref in request.job.inputs.values())
    seconds = 0.0 if request.job.audio is None else request.job.duration_s or 0.0
    return pixels + PIXELS_PER_SECOND * seconds > _MAX_SMALL_PIXELS
