"""Encoding and uploading of outputs, in threads other than the GPU thread."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

from shared.errors import EncodingFailed, FusequeueError, UploadFailed
from shared.job import Job
from shared.job_record import Artifact, Thumbnail
from shared.queue import Claim
from shared.runtime import metrics
from shared.runtime.asyncio_tools import retry_while_unavailable
from shared.storage import Storage
from worker.engine.outputs import Audio, Latents, Mesh, Output
from worker.output.image_encoding import encode, encode_latents
from worker.output.mesh_encoding import encode_mesh
from worker.output.sending import File, OutputSender

if TYPE_CHECKING:
    from worker.output.audio_encoding import SoundFile
    from worker.output.video_encoding import Video

log = structlog.get_logger()

T = TypeVar("T")
Files = dict[str, File]  # by key

ENCODER_THREADS = 2
FIRST_RETRY_S = 0.2
MAX_RETRY_S = 10.0
MIN_HELD_BYTES = 2 * 1024 * 1024  # of the spool, per output: bounds the jobs a worker holds where its images are small


class Uploader:
    """Encodes and uploads images, videos and sounds; holds up to `spool_bytes` of them while storage is unavailable.

    An upload is retried while storage is unavailable; a lasting refusal, or any other error, fails its job. `sender`
    sends the outputs of jobs with a destination. A job that is stopped, lost or released cancels its uploads. A full
    spool stops the claiming of jobs; a small output counts as `MIN_HELD_BYTES`.
    """

    def __init__(self, storage: Storage, spool_bytes: int, sender: OutputSender) -> None:
        self._storage = storage
        self._sender = sender
        self.spool_bytes = spool_bytes
        self._encoders = ThreadPoolExecutor(ENCODER_THREADS, thread_name_prefix="encode")
        self.held_bytes = 0

    @property
    def full(self) -> bool:
        return self.held_bytes >= self.spool_bytes

    def close(self) -> None:
        self._encoders.shutdown(wait=False, cancel_futures=True)

    async def upload(
        self,
        claim: Claim,
        index: int,
        output: Output | Audio | Mesh | Latents,
        on_encoded: Callable[[], None] = lambda: None,
    ) -> Artifact:
        """Encode and store output `index` of a job."""
        encoding = self._encode(claim, index, output)
        del output  # frees the pixels as soon as they are encoded
        try:
            artifact, files = await encoding
        except Exception as error:
            log.exception("output_not_encoded", job_id=claim.job.id, index=index)
            raise EncodingFailed(f"output {index} cannot be encoded: {type(error).__name__}: {error}") from error
        on_encoded()
        size = sum(len(data) for data, _ in files.values())
        with self._counted_in_spool(size) as held_bytes, metrics.upload_seconds.time():
            if claim.job.output is not None:
                await self._sender.send(claim, index, files, held_bytes)
                return artifact
            for key, (data, content_type) in files.items():
                await self._put(key, data, content_type)
        return artifact

    async def _put(self, key: str, data: bytes, content_type: str) -> None:
        put = partial(self._storage.put, key, data, content_type)
        held = self.held_bytes
        try:
            await retry_while_unavailable(
                put, "upload_failed", first_s=FIRST_RETRY_S, max_s=MAX_RETRY_S, key=key, held_bytes=held
            )
        except Exception as error:
            log.exception("output_not_stored", key=key)
            reason = error.public if isinstance(error, FusequeueError) else f"{type(error).__name__}: {error}"
            raise UploadFailed(f"{key} cannot be stored: {reason}") from error

    async def _encode(
        self, claim: Claim, index: int, output: Output | Audio | Mesh | Latents
    ) -> tuple[Artifact, Files]:
        job, key = claim.job, object_key(claim.job, claim.epoch, index)
        seed_index = index  # of a kept candidate its number, whose seed it has
        content_type = job.output_format.content_type
        common: dict[str, Any] = {"index": index, "key": key, "content_type": content_type}
        if isinstance(output, Output) and output.candidate is not None:
            seed_index = output.candidate
            common["score"] = output.score
        common["seed"] = job.seed_of(seed_index)
        common["location"] = None if job.output is None else job.output.location(key, index)
        if isinstance(output, Latents):
            data = encode_latents(output, job, index)
            height, width = output.shape[-2:]
            artifact = Artifact(**common, kind="latents", bytes=len(data), width=width, height=height)
            return artifact, {key: (data, content_type)}
        if isinstance(output, Audio):
            with self._counted_in_spool(output.nbytes):
                sound = await self._in_thread(partial(_encode_audio, output, job, index))
            return _of_sound(sound, job, common)
        if isinstance(output, Mesh):
            return await self._encode_mesh(output, job, index, common)
        common |= {"flagged": output.flagged}
        with self._counted_in_spool(output.nbytes):
            if not output.is_video:
                data = await self._in_thread(partial(encode, output.pixels, job, seed_index))
                height, width = output.pixels.shape[:2]
                return Artifact(**common, bytes=len(data), width=width, height=height), {key: (data, content_type)}
            video = await self._in_thread(partial(_encode_video, output, job, index))
        thumbnail, still = _thumbnail(job, key, video.thumbnail, video.thumbnail_size)
        artifact = Artifact(
            **common,
            kind="video",
            bytes=len(video.data),
            width=video.width,
            height=video.height,
            frames=video.frames,
            fps=video.fps,
            duration_s=video.duration_s,
            has_audio=video.has_audio,
            thumbnail=thumbnail,
        )
        return artifact, {key: (video.data, content_type), **still}

    async def _encode_mesh(self, mesh: Mesh, job: Job, index: int, common: dict[str, Any]) -> tuple[Artifact, Files]:
        with self._counted_in_spool(mesh.nbytes):
            encoded = await self._in_thread(partial(encode_mesh, mesh, job, index))
        size = (job.width, job.height)
        thumbnail, still = _thumbnail(job, common["key"], encoded.thumbnail, size)
        artifact = Artifact(
            **common,
            kind="mesh",
            bytes=len(encoded.data),
            width=job.width,
            height=job.height,
            vertices=encoded.vertices,
            faces=encoded.faces,
            thumbnail=thumbnail,
        )
        return artifact, {common["key"]: (encoded.data, common["content_type"]), **still}

    async def _in_thread(self, encode: Callable[[], T]) -> T:
        def timed() -> T:
            with metrics.encode_seconds.time():
                return encode()

        return await asyncio.get_running_loop().run_in_executor(self._encoders, timed)

    @contextmanager
    def _counted_in_spool(self, size: int) -> Iterator[int]:
        held = max(size, MIN_HELD_BYTES)
        self.held_bytes += held
        try:
            yield held
        finally:
            self.held_bytes -= held


def _thumbnail(
    job: Job, key: str, data: bytes, size: tuple[int, int], content_type: str = "image/jpeg"
) -> tuple[Thumbnail | None, Files]:
    """Return the thumbnail of the output with a key, and its file; none for a PUT URL, which is for the output only."""
    if job.output is not None and job.output.bucket is None:
        return None, {}
    width, height = size
    suffix = "jpg" if content_type == "image/jpeg" else "png"
    name = f"{key.rpartition('.')[0]}-thumbnail.{suffix}"
    still = Thumbnail(key=name, content_type=content_type, bytes=len(data), width=width, height=height)
    return still, {name: (data, content_type)}


def _of_sound(sound: "SoundFile", job: Job, common: dict[str, Any]) -> tuple[Artifact, Files]:
    thumbnail, waveform = _thumbnail(job, common["key"], sound.waveform, sound.waveform_size, "image/png")
    artifact = Artifact(
        **common,
        kind="audio",
        bytes=len(sound.data),
        width=0,
        height=0,
        duration_s=sound.duration_s,
        sample_rate=sound.sample_rate,
        channels=sound.channels,
        thumbnail=thumbnail,
    )
    return artifact, {common["key"]: (sound.data, common["content_type"]), **waveform}


def _encode_audio(sound: Audio, job: Job, index: int) -> "SoundFile":
    from worker.output.audio_encoding import encode_audio

    return encode_audio(sound, job, index)


def _encode_video(output: Output, job: Job, index: int) -> "Video":
    # Not before there is a video: the libraries of FFmpeg take 5 MB.
    from worker.output.video_encoding import encode_video

    return encode_video(output, job, index)


def object_key(job: Job, epoch: int, index: int) -> str:
    """Return the storage key of an output; it names the claim's epoch, so that two claims never share a key.

    That in the job's destination is the same for all claims: a user finds each output once.
    """
    if job.output is not None:
        return job.output.key(f"{job.id}-{index}.{job.output_format.suffix}")
    return f"{claim_prefix(job, epoch)}{index}.{job.output_format.suffix}"


def claim_prefix(job: Job, epoch: int) -> str:
    """Return the prefix of all keys of a claim."""
    return f"jobs/{job.id}/{epoch}/"
