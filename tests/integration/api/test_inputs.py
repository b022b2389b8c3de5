"""Pictures that jobs start from: however they come, checked and stored once, and gone when nobody uses them."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from shared.config.settings import Settings
from shared.errors import InputRejected, NotFound, StorageUnavailable
from shared.inputs.fetch_guard import FetchGuard, FetchRules
from shared.inputs.store import InputStore, store_input
from shared.job import InputRef
from shared.queue import Queue
from shared.storage import Storage, connect


def _picture(colour: str = "red", kind: str = "PNG") -> bytes:
    out = BytesIO()
    Image.new("RGB", (20, 10), colour).save(out, kind)
    return out.getvalue()


def _data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


class House:
    """The parts that inputs pass through, on a real Redis and a folder."""

    def __init__(self, queue: Queue, storage: Storage, settings: Settings) -> None:
        self.parts: dict[str, Any] = {"queue": queue, "storage": storage, "settings": settings}
        self.queue, self.storage = queue, storage

    async def store(self, data: bytes, tenant: str = "default", **more: Any) -> InputRef:
        return await store_input(data, tenant=tenant, **self.parts, **more)

    async def resolve(self, value: str, tenant: str = "default", **more: Any) -> InputRef:
        return await InputStore(tenant, **self.parts, **more).resolve(value)


@pytest.fixture
async def house(queue: Queue, tmp_path: Path) -> AsyncIterator[House]:
    settings = queue.client.settings.model_copy(update={"storage_dir": tmp_path, "max_input_bytes": 5000})
    storage = connect(settings)
    yield House(queue, storage, settings)
    await storage.close()


async def test_a_stored_picture_is_known_by_its_content(house: House) -> None:
    """The reference tells what the file is, and storage holds the very bytes."""
    data = _picture()
    ref = await house.store(data)
    assert (ref.content_type, ref.width, ref.height, ref.bytes) == ("image/png", 20, 10, len(data))
    assert ref.key.startswith(f"inputs/default/{ref.id}/")
    assert await house.storage.read(ref.key) == data
    assert await house.resolve(ref.id) == ref


async def test_the_same_picture_is_stored_once_for_a_tenant(house: House, tmp_path: Path) -> None:
    """An upload again, a data URL and the id all mean the one object; another tenant has its own."""
    data = _picture()
    first = await house.store(data)
    assert await house.store(data) == first
    assert await house.resolve(_data_url(data)) == first
    other = await house.store(data, tenant="other")
    assert (other.id, other.key != first.key) == (first.id, True)
    assert len(list(tmp_path.rglob("*.png"))) == 2


async def test_another_tenants_input_is_not_there(house: House) -> None:
    """Knowing an id is not owning it."""
    ref = await house.store(_picture(), tenant="other")
    with pytest.raises(InputRejected, match=f"unknown or expired input: {ref.id}") as refused:
        await house.resolve(ref.id)
    assert refused.value.param == "image"


async def test_use_starts_an_inputs_time_anew(house: House) -> None:
    """An input that jobs name again and again does not run out."""
    ref = await house.store(_picture())
    name = house.queue.client.redis_keys.input("default", ref.id)
    for use in (ref.id, _data_url(_picture())):
        await house.queue.client.redis.pexpire(name, 60_000)
        await house.resolve(use)
        assert await house.queue.client.redis.pttl(name) > 80_000_000


async def test_a_picture_whose_object_was_lost_is_stored_again(house: House) -> None:
    """A record without its object heals with the next upload."""
    data = _picture()
    ref = await house.store(data)
    await house.storage.delete_prefix(ref.key)
    assert await house.store(data) == ref
    assert await house.storage.read(ref.key) == data


async def test_the_same_picture_uploaded_at_once_is_one_object(house: House, tmp_path: Path) -> None:
    """Whoever comes first gives it its place, and the others take that."""
    refs = await asyncio.gather(*(house.store(_picture()) for _ in range(8)))
    assert len({ref.key for ref in refs}) == 1
    assert len(list(tmp_path.rglob("*.png"))) == 1


async def test_an_upload_that_storage_refuses_leaves_nothing(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its id names no input, what may lie in storage has an end, and the next upload heals it."""

    async def put(*_: object) -> None:
        raise StorageUnavailable("down")

    with monkeypatch.context() as broken:
        broken.setattr(house.storage, "put", put)
        with pytest.raises(StorageUnavailable):
            await house.store(_picture())
    (name,) = [
        key
        async for key in house.queue.client.redis.scan_iter(match=f"*{house.queue.client.settings.namespace}*input:*")
    ]
    with pytest.raises(InputRejected, match="upload it again"):
        await house.resolve(name.rpartition("|")[2])
    assert await house.queue.client.redis.zcard(house.queue.client.redis_keys.retention) == 1
    ref = await house.store(_picture())
    assert await house.resolve(ref.id) == ref
    assert await house.queue.client.redis.zcard(house.queue.client.redis_keys.retention) == 1


async def test_a_picture_that_comes_again_after_its_end_gets_a_key_of_its_own(house: House) -> None:
    """A sweep of the first one's object cannot hit the second's."""
    first = await house.store(_picture())
    await house.queue.client.redis.delete(house.queue.client.redis_keys.input("default", first.id))
    second = await house.store(_picture())
    assert (second.id, second.key != first.key) == (first.id, True)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("", "input id .in_...., a data URL or an https URL"),
        ("in_short", "input id"),
        ("in_" + "0" * 32, "unknown or expired input: in_0"),
        ("cat.png", "input id"),
        ("ftp://example.com/a.png", "input id"),
        ("http://example.com/a.png", "must start with https"),
        ("https://127.0.0.1/a.png", "loopback"),
        ("https://user@example.com/", "user or password"),
        ("data:image/png,raw", "invalid data URL"),
        ("data:text/html;base64,AAAA", "invalid data URL"),
        ("data:image/png;base64", "invalid data URL"),
        ("data:image/png;base64,", "is empty"),
        ("data:image/png;base64,%%%", "not valid base64"),
        ("data:image/png;base64,AAA", "not valid base64"),
        ("data:image/png;base64,ÄÖÜ=", "not valid base64"),
        ("data:image/png;base64,aGVsbG8=", "unsupported image; send a PNG, JPEG or WebP"),
        ("data:image/png;base64," + "A" * 30_000, "more than 5000 bytes"),
        ("data:image/png;base64," + "%41" * 7_000, "more than 5000 bytes"),
        ("data:image/png;" + "a=b;" * 10_000 + "base64,AAAA", "invalid data URL"),
    ],
)
async def test_what_is_no_picture_is_refused_by_name(house: House, value: str, words: str, tmp_path: Path) -> None:
    """Every refusal names the field and says what is wrong; nothing is stored."""
    with pytest.raises(InputRejected, match=words) as refused:
        await house.resolve(value)
    assert refused.value.param == "image"
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("form", ["data:;base64,", "DATA:image/PNG;base64,", "data:image/png;charset=x;base64,"])
async def test_the_ways_to_write_a_data_url_are_taken(house: House, form: str) -> None:
    """Case, a missing type and parameters do not matter; nor does escaped base64."""
    encoded = base64.b64encode(_picture()).decode()
    ref = await house.resolve(form + encoded)
    assert await house.resolve(form + encoded.replace("+", "%2B").replace("/", "%2F").replace("=", "%3D")) == ref


async def test_a_url_is_fetched_and_stored_like_an_upload(house: House) -> None:
    """An image behind a URL, declared as anything, is judged by its content."""
    data = _picture("blue", "WEBP")

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
        ref = await house.resolve(f"http://pictures.example:{port}/a", guard=guard)
    assert ref.content_type == "image/webp"
    assert await house.store(data) == ref


async def test_an_upload_that_is_refused_names_its_own_field(house: House) -> None:
    """`POST /v1/inputs` calls the field `file`."""
    for data in (b"no picture", _picture() + bytes(6000)):
        with pytest.raises(InputRejected) as refused:
            await house.store(data, param="file")
        assert refused.value.param == "file"


async def test_a_picture_that_comes_again_during_its_sweep_stays(house: House) -> None:
    """The sweep that was under way removes the old object, and not the one that has just been stored."""
    first = await house.store(_picture())
    keys = house.queue.client.redis_keys
    await house.queue.client.redis.zadd(
        keys.retention, {(await house.queue.client.redis.zrange(keys.retention, 0, -1))[0]: 1}
    )
    (doomed,) = await house.queue.maintenance.expired_items(10)
    second = await house.store(_picture())
    assert await house.storage.delete_prefix(doomed.prefix) == 1
    await house.queue.maintenance.forget_item(doomed)
    assert await house.resolve(second.id) == second
    assert await house.storage.read(second.key) == _picture()
    with pytest.raises(NotFound):
        await house.storage.head(first.key)
    assert await house.queue.client.redis.zcard(keys.retention) == 1


async def test_an_input_goes_when_its_time_is_over(house: House) -> None:
    """It becomes due for removal, and its object lies below what is to be removed."""
    ref = await house.store(_picture())
    keys = house.queue.client.redis_keys
    row = (await house.queue.client.redis.zrange(keys.retention, 0, -1))[0]
    await house.queue.client.redis.zadd(keys.retention, {row: 1})
    (doomed,) = await house.queue.maintenance.expired_items(10)
    assert await house.storage.delete_prefix(doomed.prefix) == 1
    await house.queue.maintenance.forget_item(doomed)
    with pytest.raises(NotFound):
        await house.storage.head(ref.key)
    assert await house.queue.jobs.get_input("default", ref.id) is None
