"""Input images, videos and sounds: validated, stored once per content, and kept while in use."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import unquote_to_bytes

from api.jobs.expected_inputs import artifact_kind, check_is_made, check_pixels, expected_input
from shared.artifact_ref import ArtifactRef, InputSource
from shared.config.catalog import Catalog
from shared.config.settings import Settings
from shared.config.size_steps import XL_SCALE
from shared.errors import FetchFailed, FetchInterrupted, FetchRefused, InputNotFetched, InputRejected, NotFound
from shared.inputs.fetch_guard import FetchGuard, FetchRules
from shared.inputs.validation import VIDEO_FIELDS, ImageFile, inspect
from shared.job import InputRef, Job
from shared.runtime.shares import SharedPool, SharedTurns
from shared.storage import Storage

if TYPE_CHECKING:
    from shared.queue import Queue

T = TypeVar("T")
Read = Callable[[], Awaitable[bytes]]

INPUT_ID = re.compile(r"in_[0-9a-f]{32}")
_JOB_ID = re.compile(r"job_[0-9a-hjkmnp-tv-z]{26}")
_ARTIFACT = re.compile(r"(job_[0-9a-hjkmnp-tv-z]{26})/artifacts/(\d{1,4})(?:\?[^#]*)?")
_MEDIA = r"(?:image|audio)/[a-z0-9.+-]+|video/(?:mp4|quicktime|x-m4v)|application/safetensors"
_DATA_URL = re.compile(rf"data:({_MEDIA})?(;[a-z0-9=_.+-]+)*;base64", re.IGNORECASE)
KINDS: Mapping[str, str] = {
    "image": "an image",
    "video": "a video",
    "audio": "a sound",
    "mesh": "a mesh",
    "latents": "latents",
}
_KIND_OF_FIELD: Mapping[str, str] = {"audio": "audio", **dict.fromkeys(VIDEO_FIELDS, "video")}
_threads = ThreadPoolExecutor(2, "input-image")

# Bytes of input images in one process, from their reading to the end of their upload. Each counts twice: as sent, and
# as stored; a small one as a megabyte, so that a tenant stores 48 at a time.
_MIN_BYTES = 96 * 1024 * 1024
_SMALL_IMAGE = 1024 * 1024
_LARGEST_IMAGES = 2  # that always fit
_MAX_WAITING = 256  # of one tenant; uploads wait in temporary files
_TURN_S = 20.0


@cache
def _turns(max_input_bytes: int) -> SharedTurns:
    pool = SharedPool("input_images", max(_MIN_BYTES, 2 * _LARGEST_IMAGES * max_input_bytes))
    return SharedTurns(pool, max_waiting=_MAX_WAITING, timeout_s=_TURN_S)


@dataclass(frozen=True)
class InputStore:
    """Input images of one tenant. `guard` fetches URLs; by default with the rules of the settings.

    `base_url` is that of the API: URLs of artifacts below it are read from the storage. `catalog` has the models of
    jobs that have not ended.
    """

    tenant: str
    queue: Queue
    storage: Storage
    settings: Settings
    guard: FetchGuard | None = None
    base_url: str = ""
    catalog: Catalog | None = None

    async def resolve(self, value: InputSource, param: str = "image") -> InputRef:
        """Return the stored image of an input id, an artifact, a data URL or an https URL; restarts its retention.

        An artifact is named by a reference, the id of a job, for its first image, or a URL; that of a job that has not
        ended is not stored, and returned as it will be. Raises `InputRejected` naming `param`, the request field, or
        `Overloaded`.
        """
        named = self._named(value)
        if isinstance(named, ArtifactRef):
            return await self._put_artifact(named, param)
        if not INPUT_ID.fullmatch(named):
            return await self._put_url(named, param)
        ref = await self._kept(named)
        if ref is None:
            raise InputRejected(f"{param}: unknown or expired input: {named}; upload it again", param=param)
        return ref

    async def _kept(self, input_id: str) -> InputRef | None:
        """Return a stored image, and restart its retention; None if there is none, or its object is lost."""
        kept_s = self.queue.client.policy("input_retention_s")
        ref = await self.queue.inputs.keep(self.tenant, input_id, kept_s)
        return ref if ref is not None and await _is_stored(ref, self.storage) else None

    def _named(self, value: InputSource) -> InputSource:
        """Return the artifact that a reference, a job's id or an artifact's URL names; any other text as it is."""
        if isinstance(value, ArtifactRef):
            return value
        if _JOB_ID.fullmatch(value):
            return ArtifactRef(job=value)
        prefix = f"{self.base_url}/v1/jobs/"
        is_own = self.base_url and value.startswith(prefix)
        match = _ARTIFACT.fullmatch(value.removeprefix(prefix)) if is_own else None
        return value if match is None else ArtifactRef(job=match[1], artifact=int(match[2]))

    async def _put_artifact(self, ref: ArtifactRef, param: str) -> InputRef:
        """Store an image of a job as an input, so that the job can be deleted; of one that has not ended, return what
        it will be. Signatures of URLs do not count: the job must be the tenant's own."""
        job_id, index = ref.job, ref.artifact
        record = await self.queue.jobs.get(job_id)
        if record is None or record.job.tenant != self.tenant:
            raise InputRejected(f"{param}: there is no job {job_id}, or it has been deleted", param=param)
        if not record.state.terminal:
            return self._expected(ref, record.job, param)
        artifact = next((artifact for artifact in record.artifacts if artifact.index == index), None)
        if artifact is None:
            state = f"is {record.state.value} and has {len(record.artifacts)} artifacts"
            raise InputRejected(f"{param}: job {job_id} {state}; it has no artifact {index}", param=param)
        _check_artifact_kind(ref, artifact.kind, param)
        if artifact.location is not None:
            message = f"{param}: artifact {index} of job {job_id} is not stored here but at {artifact.location}"
            raise InputRejected(f"{message}; upload it, or send a URL of it", param=param)
        try:
            copy = await self.put_upload(
                lambda: self.storage.read(artifact.key, 0, artifact.bytes), artifact.bytes, param
            )
        except NotFound:
            raise InputRejected(f"{param}: there is no job {job_id}, or it has been deleted", param=param) from None
        return copy.model_copy(update={"copy_of": ref})

    def _expected(self, ref: ArtifactRef, job: Job, param: str) -> InputRef:
        """Return the input that an artifact of a job that has not ended will be."""
        check_is_made(ref, job, param)
        _check_artifact_kind(ref, artifact_kind(job), param)
        spec = None if self.catalog is None else self.catalog.find(job.model)
        expected = expected_input(ref, job, XL_SCALE if spec is None else spec.latent_scale)
        check_pixels(expected, self.settings.max_input_pixels, param)
        return expected

    async def _put_url(self, url: str, param: str) -> InputRef:
        scheme = url[:8].lower()
        if scheme.startswith("data:"):
            most = self.settings.max_input_bytes
            size = min(most, 3 * len(url) // 4)  # decoded when there is room for it
            return await self.put_upload(lambda: _on_thread(lambda: _from_data_url(url, most, param)), size, param)
        check_reference(url, param)
        guard = self.guard or FetchGuard(FetchRules.for_inputs(self.settings), tenant=self.tenant)
        try:
            async with guard.fetched(url) as data:
                return await self.put(data, param)
        except FetchInterrupted as error:
            raise InputNotFetched(f"{param}: {error.message}", param=param) from error
        except (FetchRefused, FetchFailed) as error:
            raise InputRejected(f"{param}: {error.message}", param=param) from error

    async def put(self, data: bytes, param: str = "image") -> InputRef:
        """Validate and store an image; see `put_upload`."""

        async def read() -> bytes:
            return data

        return await self.put_upload(read, len(data), param)

    async def put_upload(self, read: Read, size: int, param: str = "image", input_id: str | None = None) -> InputRef:
        """Validate and store the image of `size` bytes that `read` returns; it is read when there is room for it.

        An image that the tenant has already is not stored again; its retention restarts. The id is that of the bytes
        as sent, unless it is given. Raises `InputRejected` naming `param`, or `Overloaded`.
        """
        most = self.settings.max_input_bytes
        if size > most:
            raise InputRejected(f"{param}: {size} bytes; at most {most} are allowed", param=param)
        async with _turns(most).turn(self.tenant, max(_SMALL_IMAGE, 2 * size)):
            return await self._put(await read(), param, input_id)

    async def _put(self, data: bytes, param: str, input_id: str | None) -> InputRef:
        settings, kept_s = self.settings, self.queue.client.policy("input_retention_s")
        if input_id is None:
            input_id = f"in_{(await _on_thread(lambda: hashlib.sha256(data).hexdigest()))[:32]}"
        if (known := await self._kept(input_id)) is not None:
            return known
        limits = {"max_bytes": settings.max_input_bytes, "max_pixels": settings.max_input_pixels}
        image = await _on_thread(lambda: inspect(data, **limits, param=param))
        # First the record, which schedules the object's deletion: a crash before the upload leaves nothing behind. An
        # image whose object is lost has one.
        ref = await self.queue.inputs.put(self.tenant, _new_ref(self.tenant, input_id, image), kept_s)
        await self.storage.put(ref.key, image.data, ref.content_type)
        if await self.queue.inputs.keep(self.tenant, input_id, kept_s) != ref:
            await self.storage.delete_prefix(ref.key)
            raise InputRejected(
                f"{param}: input {input_id} was deleted during its upload; upload it again", param=param
            )
        return ref


def check_reference(value: str, param: str) -> None:
    """Raise `InputRejected` for a text that can name no image, whatever is stored."""
    is_id = INPUT_ID.fullmatch(value) or _JOB_ID.fullmatch(value)
    if not is_id and not value[:8].lower().startswith(("data:", "http:", "https:")):
        raise InputRejected(
            f"{param} must be an input id (in_...), a job id (job_...), a data URL or an https URL", param=param
        )


def _new_ref(tenant: str, input_id: str, image: ImageFile) -> InputRef:
    # With the random token, the sweep of an expired object cannot delete the same image uploaded again.
    key = f"inputs/{tenant}/{input_id}/{secrets.token_hex(8)}.{image.content_type.rpartition('/')[2]}"
    return InputRef(
        id=input_id,
        key=key,
        content_type=image.content_type,
        bytes=len(image.data),
        width=image.width,
        height=image.height,
        frames=image.frames,
        fps=image.fps,
        hidden_frames=image.hidden_frames,
        duration_s=image.duration_s,
    )


def _check_artifact_kind(ref: ArtifactRef, kind: str, param: str) -> None:
    """Raise `InputRejected` for an artifact of another kind than the field takes."""
    wanted = kind_of(param)
    if kind not in (wanted, "latents"):
        what = f"{KINDS[kind]}, not {KINDS[wanted]}"
        raise InputRejected(f"{param}: artifact {ref.artifact} of job {ref.job} is {what}", param=param)


def kind_of(param: str) -> str:
    """Return the kind of file that a field of requests takes."""
    return _KIND_OF_FIELD.get(param, "image")


async def _is_stored(ref: InputRef, storage: Storage) -> bool:
    try:
        return (await storage.head(ref.key)).size == ref.bytes
    except NotFound:
        return False


def _from_data_url(value: str, max_bytes: int, param: str) -> bytes:
    head, comma, payload = value[:200].partition(",")
    if not comma or not _DATA_URL.fullmatch(head):
        example = {"video": "video/mp4", "audio": "audio/wav", "image": "image/png"}[kind_of(param)]
        raise InputRejected(f"{param}: invalid data URL; use data:{example};base64,...", param=param)
    payload = value[len(head) + 1 :]
    limit = 4 * -(-max_bytes // 3)
    # Checked before unescaping, when a character can take three, and after.
    if len(payload) > 3 * limit or len(encoded := unquote_to_bytes(payload)) > limit:
        raise InputRejected(f"{param}: the data URL has more than {max_bytes} bytes", param=param)
    try:
        return base64.b64decode(encoded, validate=True)
    except binascii.Error as error:
        raise InputRejected(f"{param}: the data URL is not valid base64", param=param) from error


async def _on_thread(work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(_threads, work)
