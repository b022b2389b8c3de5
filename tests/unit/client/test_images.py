"""What can be an image of a job, against the real API."""

from __future__ import annotations

import asyncio
import base64
import io
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness.http_server import png
from harness.tables import row
from PIL import Image

from fusequeue import AsyncClient, Invalid, InvalidArgument, Result
from shared.queue import Claim

PROMPT = "a red circle on a blue ground, left"
Next = Callable[[], Awaitable[Claim]]
Work = Callable[..., Awaitable[bytes]]


class OtherPath:
    """A path that is neither a text nor of pathlib."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)


class Upload(io.BytesIO):
    """A file as web frameworks have it, which can save itself."""

    def save(self, target: object, buffer_size: int = 16384) -> None:
        raise AssertionError("the file was saved")


SOURCES: dict[str, Callable[[Path], object]] = {
    "path": lambda path: path,
    "text": str,
    "other path": OtherPath,
    "bytes": Path.read_bytes,
    "bytearray": lambda path: bytearray(path.read_bytes()),
    "memoryview": lambda path: memoryview(path.read_bytes()),
    "open file": lambda path: path.open("rb"),
    "file in memory": lambda path: io.BytesIO(path.read_bytes()),
    "upload": lambda path: Upload(path.read_bytes()),
    "Pillow": Image.open,
    "data URL": lambda path: f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}",
}


async def test_an_image_is_given_in_any_form(api: AsyncClient, next_job: Next, tmp_path: Path) -> None:
    """The id of an input follows from its content."""
    path = tmp_path / "a sketch.png"
    path.write_bytes(png())
    expected = await api.upload(png())
    for kind, make in {**SOURCES, "id": lambda _: expected}.items():
        with row(kind):
            source: Any = make(path)
            await api.submit("demo", PROMPT, image=source, strength=0.5)
            assert [image.id for image in (await next_job()).job.images] == [expected]
            if hasattr(source, "close"):
                source.close()


async def test_a_result_is_the_next_image(api: AsyncClient, next_job: Next, work: Work) -> None:
    running = asyncio.create_task(api.run("demo", PROMPT))
    await work()
    result: Result = await running
    artifact, expected = result.job.artifacts[0], await api.upload(result.data[0])
    for source in (result.job, result.job.id, result, artifact, artifact.url):
        with row(source):
            job = await api.submit("demo", PROMPT, image=source, strength=0.5)
            assert job.task == "image_to_image"
            assert [image.id for image in (await next_job()).job.images] == [expected]


async def test_a_job_that_has_not_run_is_the_next_image(api: AsyncClient) -> None:
    job = await api.submit("demo", PROMPT)
    for source in (job, job.id, {"job": job}, {"job": job.id, "artifact": 0}):
        with row(source):
            image: Any = source
            child = await api.submit("demo", PROMPT, image=image, strength=0.5)
            assert child.image is not None
            assert (child.image.job, child.image.artifact, child.image.id) == (job.id, 0, None)
            assert child.queue is not None
            assert child.queue.reason == "waiting"
    with pytest.raises(Invalid, match="artifact is at most 0, not 3"):
        await api.submit("demo", PROMPT, image={"job": job, "artifact": 3}, strength=0.5)


async def test_all_fields_that_are_images_are_uploaded() -> None:
    bodies: list[dict[str, Any]] = []
    job = {"id": "job_1", "status": "queued", "model": "m", "prompt": "x", "seed": 1, "n": 1, "steps": 1}
    job |= {"width": 8, "height": 8, "guidance_scale": 1, "created_at": "2026-01-31T12:00:00Z"}

    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/inputs":
            return httpx.Response(201, json={"id": f"in_{len(request.read())}"})
        bodies.append(httpx.Response(200, content=request.read()).json())
        return httpx.Response(202, json=job)

    async with AsyncClient(transport=httpx.MockTransport(handler)) as api:
        await api.submit("m", "x", image=b"1", mask=b"2", last_image=b"3", images=(each for each in (b"4", "in_9")))
        await api.submit("m", "x", controls=[{"id": "edges", "image": b"5", "end": 0.5}], image=None, steps=4)
    first, second = bodies
    assert {len(str(value)) for value in (first["image"], first["mask"], first["last_image"])} == {len("in_123")}
    assert first["images"][0].startswith("in_")
    assert first["images"][1] == "in_9"
    assert second.keys() == {"model", "prompt", "controls", "steps"}
    assert second["controls"][0]["image"].startswith("in_")
    assert second["controls"][0]["end"] == 0.5


NO_IMAGES = [
    (r"^image: not an image: 5; use a path", {"image": 5}),
    (r"^mask: not an image", {"mask": ["a.png"]}),
    (r"^images: 'a\.png' is not a list", {"images": "a.png"}),
    (r"^images: 5 is not a list", {"images": 5}),
    (r"^images\.1: not an image: 1\.5", {"images": ["in_1", 1.5]}),
    (r"^controls: \{'id': 'edges'\} is not a list", {"controls": {"id": "edges"}}),
    (r"^controls\.0\.image: not an image", {"controls": [{"id": "edges", "image": 5}]}),
    (r"^image: .* binary mode", {"image": io.StringIO("text")}),
]


async def test_what_is_no_image_is_refused_by_its_field() -> None:
    for message, arguments in NO_IMAGES:
        with row(message):

            def handler(request: httpx.Request) -> httpx.Response:
                raise AssertionError(f"sent: {request.url}")

            async with AsyncClient(transport=httpx.MockTransport(handler)) as api:
                with pytest.raises(InvalidArgument, match=message):
                    await api.submit("demo", "x", **arguments)


async def test_a_path_without_a_file_is_an_error_with_the_path(api: AsyncClient, tmp_path: Path) -> None:
    for path in (tmp_path / "missing.png", os.fspath(tmp_path / "missing.png")):
        with pytest.raises(FileNotFoundError, match=r"missing\.png"):
            await api.submit("demo", PROMPT, image=path)


async def test_a_file_that_is_no_image_is_refused_by_its_field(api: AsyncClient) -> None:
    """Not as the `file` of the upload."""
    for name, arguments in (("image", {"image": b"GIF89a"}), ("images.1", {"images": [png(), b""]})):
        wrong: Any = arguments
        with pytest.raises(Invalid) as caught:
            await api.submit("demo", PROMPT, **wrong)
        error = caught.value
        assert (error.code, error.param, [fault.field for fault in error.errors]) == (
            "invalid_input_image",
            name,
            [name],
        )
        assert str(error).count(name) == 1
        assert "file:" not in str(error)
    with pytest.raises(Invalid, match=r"^file: "):
        await api.upload(b"")
