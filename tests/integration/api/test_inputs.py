"""Input images from every source: checked, stored once, and removed when unused."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from fuzz.hostile_images import SECRET, with_metadata
from harness.videos import a_plain_video
from PIL import Image

from api.jobs.input_store import InputStore
from shared.config.settings import Settings
from shared.errors import InputRejected, NotFound, StorageUnavailable
from shared.inputs.fetch_guard import FetchGuard, FetchRules
from shared.job import InputRef
from shared.queue import Queue
from shared.storage import Storage, connect


def _image(colour: str = "red", kind: str = "PNG") -> bytes:
    out = BytesIO()
    Image.new("RGB", (20, 10), colour).save(out, kind)
    return out.getvalue()


def _data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


class InputHarness:
    """Input store on a real Redis and a folder."""

    def __init__(self, queue: Queue, storage: Storage, settings: Settings) -> None:
        self.parts: dict[str, Any] = {"queue": queue, "storage": storage, "settings": settings}
        self.queue, self.storage, self.settings = queue, storage, settings

    def of(self, tenant: str) -> InputStore:
        return InputStore(tenant, **self.parts)

    async def store(self, data: bytes, tenant: str = "default", **more: Any) -> InputRef:
        return await self.of(tenant).put(data, **more)

    async def resolve(self, value: str, tenant: str = "default", **more: Any) -> InputRef:
        return await InputStore(tenant, **self.parts, **more).resolve(value)

    async def delete(self, input_id: str) -> None:
        item = await self.queue.maintenance.forget_input("default", input_id)
        assert item is not None
        await self.storage.delete_prefix(item.prefix)
        await self.queue.maintenance.forget_item(item)


@pytest.fixture
async def inputs(queue: Queue, tmp_path: Path) -> AsyncIterator[InputHarness]:
    settings = queue.client.settings.model_copy(update={"storage_dir": tmp_path, "max_input_bytes": 1024 * 1024})
    storage = connect(settings)
    yield InputHarness(queue, storage, settings)
    await storage.close()


async def test_an_input_id_depends_on_the_content(inputs: InputHarness) -> None:
    """The reference describes the file, and storage holds exactly its bytes."""
    data = _image()
    ref = await inputs.store(data)
    assert (ref.content_type, ref.width, ref.height, ref.bytes) == ("image/png", 20, 10, len(data))
    assert ref.key.startswith(f"inputs/default/{ref.id}/")
    assert await inputs.storage.read(ref.key) == data
    assert await inputs.resolve(ref.id) == ref


async def test_what_is_stored_of_an_image_has_no_metadata(inputs: InputHarness) -> None:
    """Places where photos were taken, comments and hidden files; the id is that of the bytes as sent."""
    plain = _image(kind="JPEG")
    sent = with_metadata(plain, orientation=6)
    ref = await inputs.store(sent)
    stored = await inputs.storage.read(ref.key)
    assert SECRET in sent
    assert SECRET not in stored
    assert (ref.width, ref.height, ref.bytes) == (10, 20, len(stored))
    assert await inputs.store(sent) == ref
    assert await inputs.resolve(ref.id) == ref
    assert (await inputs.store(plain)).id != ref.id


async def test_a_tenant_with_many_slow_uploads_leaves_room_for_another(
    inputs: InputHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as it can have; the other's are stored meanwhile, in less than two seconds."""
    greedy, slow, finish = inputs.of("greedy"), inputs.storage.put, asyncio.Event()

    async def put(key: str, data: bytes, content_type: str) -> None:
        if "/greedy/" in key:
            await finish.wait()
        await slow(key, data, content_type)

    monkeypatch.setattr(inputs.storage, "put", put)
    size, read = inputs.settings.max_input_bytes, []

    async def upload(index: int) -> InputRef:
        async def read_file() -> bytes:
            read.append(index)
            return _image("blue") + index.to_bytes(2)

        return await greedy.put_upload(read_file, size)

    uploads = [asyncio.create_task(upload(index)) for index in range(200)]
    async with asyncio.timeout(30):
        while len(read) < 24:  # half of 96 MiB, each twice a MiB
            await asyncio.sleep(0.01)
        async with asyncio.timeout(2):
            refs = [await inputs.store(_image(colour), tenant="other") for colour in ("red", "green")]
        assert len(refs) == 2
        assert len(read) == 24
        finish.set()
        assert len({ref.id for ref in await asyncio.gather(*uploads)}) == 200


async def test_equal_images_of_a_tenant_are_stored_once(inputs: InputHarness, tmp_path: Path) -> None:
    """A second upload, a data URL and the id refer to one object; another tenant has a separate one."""
    data = _image()
    first = await inputs.store(data)
    assert await inputs.store(data) == first
    assert await inputs.resolve(_data_url(data)) == first
    other = await inputs.store(data, tenant="other")
    assert (other.id, other.key != first.key) == (first.id, True)
    assert len(list(tmp_path.rglob("*.png"))) == 2


async def test_use_extends_the_life_of_an_input(inputs: InputHarness) -> None:
    """An input in use does not expire."""
    ref = await inputs.store(_image())
    name = inputs.queue.client.redis_keys.input("default", ref.id)
    for use in (ref.id, _data_url(_image())):
        await inputs.queue.client.redis.pexpire(name, 60_000)
        await inputs.resolve(use)
        assert await inputs.queue.client.redis.pttl(name) > 80_000_000


async def test_an_image_whose_object_was_lost_is_stored_again(inputs: InputHarness) -> None:
    """The next upload repairs a record without its object."""
    data = _image()
    ref = await inputs.store(data)
    await inputs.storage.delete_prefix(ref.key)
    assert await inputs.store(data) == ref
    assert await inputs.storage.read(ref.key) == data


async def test_concurrent_uploads_of_one_image_make_one_object(inputs: InputHarness, tmp_path: Path) -> None:
    """The first upload determines the key, and the others use it."""
    refs = await asyncio.gather(*(inputs.store(_image()) for _ in range(8)))
    assert len({ref.key for ref in refs}) == 1
    assert len(list(tmp_path.rglob("*.png"))) == 1


async def test_an_upload_refused_by_storage_leaves_no_input(
    inputs: InputHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no input, remains in storage expire, and the next upload succeeds."""

    async def put(*_: object) -> None:
        raise StorageUnavailable("down")

    with monkeypatch.context() as broken:
        broken.setattr(inputs.storage, "put", put)
        with pytest.raises(StorageUnavailable):
            await inputs.store(_image())
    (name,) = [
        key
        async for key in inputs.queue.client.redis.scan_iter(match=f"*{inputs.queue.client.settings.namespace}*input:*")
    ]
    with pytest.raises(InputRejected, match="upload it again"):
        await inputs.resolve(name.rpartition("|")[2])
    assert await inputs.queue.client.redis.zcard(inputs.queue.client.redis_keys.retention) == 1
    ref = await inputs.store(_image())
    assert await inputs.resolve(ref.id) == ref
    assert await inputs.queue.client.redis.zcard(inputs.queue.client.redis_keys.retention) == 1


async def test_an_image_uploaded_again_after_its_expiry_gets_another_key(inputs: InputHarness) -> None:
    """A sweep of the first object cannot remove the second."""
    first = await inputs.store(_image())
    await inputs.queue.client.redis.delete(inputs.queue.client.redis_keys.input("default", first.id))
    second = await inputs.store(_image())
    assert (second.id, second.key != first.key) == (first.id, True)


@pytest.mark.parametrize("use", ["its id", "its content"])
async def test_an_image_that_is_deleted_while_it_is_used_again_stays_deleted(
    inputs: InputHarness, monkeypatch: pytest.MonkeyPatch, use: str
) -> None:
    """No record without an object comes back; the submit refuses the job."""
    ref, look = await inputs.store(_image()), inputs.storage.head

    async def head(key: str) -> Any:
        found = await look(key)
        await inputs.delete(ref.id)
        return found

    monkeypatch.setattr(inputs.storage, "head", head)
    await inputs.resolve(ref.id if use == "its id" else _data_url(_image()))
    assert await inputs.queue.inputs.get_many("default", [ref.id]) == [None]
    assert await inputs.queue.api_keys.footprints() == {}


async def test_nothing_is_left_of_an_image_that_is_deleted_during_its_upload(
    inputs: InputHarness, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    put = inputs.storage.put

    async def slow(key: str, data: bytes, content_type: str) -> None:
        await inputs.delete(key.split("/")[2])
        await put(key, data, content_type)

    monkeypatch.setattr(inputs.storage, "put", slow)
    with pytest.raises(InputRejected, match="was deleted during its upload"):
        await inputs.store(_image())
    assert not list(tmp_path.rglob("*.png"))
    assert await inputs.queue.api_keys.footprints() == {}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("", "input id .in_...., a job id .job_...., a data URL"),
        ("in_short", "input id"),
        ("in_" + "0" * 32, "unknown or expired input: in_0"),
        ("cat.png", "input id"),
        ("ftp://example.com/a.png", "input id"),
        ("https://127.0.0.1/a.png", "loopback"),
        ("data:image/png,raw", "invalid data URL"),
        ("data:text/html;base64,AAAA", "invalid data URL"),
        ("data:image/png;base64", "invalid data URL"),
        ("data:image/png;base64,", "is empty"),
        ("data:image/png;base64,%%%", "not valid base64"),
        ("data:image/png;base64,AAA", "not valid base64"),
        ("data:image/png;base64,ÄÖÜ=", "not valid base64"),
        ("data:image/png;base64,aGVsbG8=", "unsupported image; send a PNG, JPEG or WebP"),
        ("data:image/png;base64," + "A" * 1_500_000, "more than 1048576 bytes"),
        ("data:image/png;base64," + "%41" * 1_400_000, "more than 1048576 bytes"),
        ("data:image/png;" + "a=b;" * 10_000 + "base64,AAAA", "invalid data URL"),
    ],
)
async def test_an_invalid_image_is_refused_by_field(
    inputs: InputHarness, value: str, words: str, tmp_path: Path
) -> None:
    """The error names the field and the fault; nothing is stored."""
    with pytest.raises(InputRejected, match=words) as refused:
        await inputs.resolve(value)
    assert refused.value.param == "image"
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("form", ["data:;base64,", "DATA:image/PNG;base64,", "data:image/png;charset=x;base64,"])
async def test_all_forms_of_data_urls_are_accepted(inputs: InputHarness, form: str) -> None:
    """Case, a missing type, parameters and escaped base64 do not matter."""
    encoded = base64.b64encode(_image()).decode()
    ref = await inputs.resolve(form + encoded)
    assert await inputs.resolve(form + encoded.replace("+", "%2B").replace("/", "%2F").replace("=", "%3D")) == ref


async def test_a_url_is_fetched_and_stored_like_an_upload(inputs: InputHarness) -> None:
    """The content counts, not the declared type."""
    data = _image("blue", "WEBP")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        await writer.drain()
        writer.close()

    async def resolve(host: str, port: int) -> Sequence[str]:
        return ["127.0.0.1"]

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        settings = Settings(fetch_allow_networks=("127.0.0.0/8",), fetch_allow_http=True, fetch_ports=(port,))
        guard = FetchGuard(FetchRules.for_inputs(settings), resolve)
        ref = await inputs.resolve(f"http://images.example:{port}/a", guard=guard)
    assert ref.content_type == "image/webp"
    assert await inputs.store(data) == ref


@pytest.mark.parametrize(("param", "kind"), [("image", "image/png"), ("video", "video/mp4"), ("audio", "audio/wav")])
async def test_a_wrong_data_url_is_refused_with_one_of_its_field(inputs: InputHarness, param: str, kind: str) -> None:
    with pytest.raises(InputRejected, match=f"{param}: invalid data URL; use data:{kind};base64"):
        await InputStore("default", **inputs.parts).resolve("data:text/html;base64,AAAA", param)


async def test_a_data_url_can_name_the_type_that_browsers_give_to_m4v_files(inputs: InputHarness) -> None:
    assert (await inputs.resolve(_data_url(a_plain_video("red"), "video/x-m4v"))).content_type == "video/mp4"


async def test_an_image_uploaded_during_its_sweep_stays(inputs: InputHarness) -> None:
    """The running sweep removes the old object, not the new one."""
    first = await inputs.store(_image())
    keys = inputs.queue.client.redis_keys
    await inputs.queue.client.redis.zadd(
        keys.retention, {(await inputs.queue.client.redis.zrange(keys.retention, 0, -1))[0]: 1}
    )
    (doomed,) = await inputs.queue.maintenance.expired_items(10)
    second = await inputs.store(_image())
    assert await inputs.storage.delete_prefix(doomed.prefix) == 1
    await inputs.queue.maintenance.forget_item(doomed)
    assert await inputs.resolve(second.id) == second
    assert await inputs.storage.read(second.key) == _image()
    with pytest.raises(NotFound):
        await inputs.storage.head(first.key)
    assert await inputs.queue.client.redis.zcard(keys.retention) == 1


async def test_an_expired_input_is_removed(inputs: InputHarness) -> None:
    """It is listed for removal, and its object is below the prefix to remove."""
    ref = await inputs.store(_image())
    keys = inputs.queue.client.redis_keys
    row = (await inputs.queue.client.redis.zrange(keys.retention, 0, -1))[0]
    await inputs.queue.client.redis.zadd(keys.retention, {row: 1})
    (doomed,) = await inputs.queue.maintenance.expired_items(10)
    assert await inputs.storage.delete_prefix(doomed.prefix) == 1
    await inputs.queue.maintenance.forget_item(doomed)
    with pytest.raises(NotFound):
        await inputs.storage.head(ref.key)
    assert await inputs.queue.inputs.get_many("default", [ref.id]) == [None]
