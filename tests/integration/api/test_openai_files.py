"""Files with the unmodified `openai` SDK and a real API."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Any

import openai
import pytest
from harness.api_process import Server
from harness.api_thread import ApiThread

from api.chores.retention import sweep_chunk
from shared.batch import File
from shared.queue import Queue
from shared.storage import connect

LINES = b'{"custom_id":"a","method":"POST","url":"/v1/jobs","body":{}}\n' * 3


@pytest.fixture
def server(serve: Callable[..., ApiThread]) -> ApiThread:
    return serve()


@pytest.fixture
def client(server: ApiThread) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_files_are_stored_listed_read_and_deleted(client: openai.OpenAI) -> None:
    created = [
        client.files.create(file=(f"{number}.jsonl", BytesIO(LINES + b"%d" % number)), purpose="batch")
        for number in range(5)
    ]
    first = created[0]
    assert (first.object, first.filename, first.bytes, first.status) == ("file", "0.jsonl", len(LINES) + 1, "processed")
    assert first.expires_at is not None
    assert first.expires_at > first.created_at
    assert client.files.retrieve(first.id) == first
    assert client.files.content(first.id).read() == LINES + b"0"
    assert [file.id for file in client.files.list(limit=2)] == [file.id for file in reversed(created)]
    assert [file.id for file in client.files.list(limit=2, order="asc")] == [file.id for file in created]

    assert client.files.delete(first.id).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError) as error:
            call(first.id)
        assert error.value.code == "not_found"


async def test_a_list_of_one_purpose_is_paged_by_it(client: openai.OpenAI, server: ApiThread) -> None:
    """Also when the newest files are of the other purpose."""
    queue = Queue.connect(server.settings)
    ids: dict[str, list[str]] = {"batch_output": [], "batch": []}
    for number in range(10):
        purpose = "batch_output" if number < 5 else "batch"
        file = File(
            id=f"file_{number}",
            tenant="default",
            filename="a.jsonl",
            purpose=purpose,
            bytes=0,
            created_at_ms=1_000 + number,
            expires_at_ms=10**13,
        )
        await queue.files.begin("default", file.id, 1)
        await queue.files.put(file, [])
        ids[purpose].append(file.id)
    await queue.close()
    for purpose, expected in ids.items():
        assert [file.id for file in client.files.list(purpose=purpose, limit=2)] == expected[::-1]
        assert [file.id for file in client.files.list(purpose=purpose, limit=5, order="asc")] == expected
        page = client.files.list(purpose=purpose, limit=5)
        assert (len(page.data), page.has_more) == (5, False)
    assert client.files.list(purpose="vision").data == []


def test_a_file_is_kept_for_expires_after(client: openai.OpenAI) -> None:
    def kept_s(**fields: Any) -> int:
        file = client.files.create(file=("a.jsonl", BytesIO(LINES)), purpose="batch", **fields)
        return (file.expires_at or 0) - file.created_at

    assert kept_s() == 7 * 86_400
    assert kept_s(expires_after={"anchor": "created_at", "seconds": 3_600}) == 3_600
    assert kept_s(expires_after={"anchor": "created_at", "seconds": 30 * 86_400}) == 30 * 86_400
    for fault, param in (
        ({"anchor": "created_at", "seconds": 60}, "expires_after.seconds"),
        ({"anchor": "created_at"}, "expires_after.seconds"),
        ({"anchor": "last_used", "seconds": 3_600}, "expires_after.anchor"),
    ):
        with pytest.raises(openai.BadRequestError) as error:
            kept_s(expires_after=fault)
        assert error.value.param == param


def test_an_invalid_upload_is_refused(serve: Callable[..., ApiThread]) -> None:
    """The error names the field; nothing is stored."""
    with openai.OpenAI(base_url=f"{serve(max_file_bytes=100_000).url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match="purpose"):
            client.files.create(file=("a.jsonl", BytesIO(LINES)), purpose="vision")
        with pytest.raises(openai.BadRequestError, match="empty"):
            client.files.create(file=("a.jsonl", BytesIO(b"")), purpose="batch")
        for size in (100_001, 200_000):  # by the size of the file, and by the Content-Length
            with pytest.raises(openai.APIStatusError) as error:
                client.files.create(file=("a.jsonl", BytesIO(b"x" * size)), purpose="batch")
            assert error.value.status_code == 413
        assert client.files.list().data == []


def test_a_large_file_is_streamed(start: Callable[..., Server]) -> None:
    """48 MB up and down do not raise the server's peak memory."""
    server = start()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        client.files.create(file=("warm.jsonl", BytesIO(LINES)), purpose="batch")
        data = bytes(range(256)) * 4096 * 48
        before = server.reset_peak()
        file = client.files.create(file=("large.jsonl", BytesIO(data)), purpose="batch")
        with client.files.with_streaming_response.content(file.id) as response:
            offset = 0
            for chunk in response.iter_bytes():
                assert chunk == data[offset : offset + len(chunk)]
                offset += len(chunk)
    assert offset == len(data)
    assert server.peak_kb() - before < 24 * 1024


async def test_the_sweep_removes_expired_files_and_unfinished_uploads(client: openai.OpenAI, server: ApiThread) -> None:
    file = client.files.create(file=("a.jsonl", BytesIO(LINES)), purpose="batch")
    queue, storage = Queue.connect(server.settings), connect(server.settings)
    try:
        await queue.files.begin("default", "file_half", 1)
        await storage.put("files/default/file_half/00000.jsonl", b"x", "application/jsonl")
        for row in await queue.client.redis.zrange(queue.client.redis_keys.retention, 0, -1):
            await queue.client.redis.zadd(queue.client.redis_keys.retention, {row: 1})
        assert (await sweep_chunk(queue, storage)).removed == 2
        assert await storage.delete_prefix("files") == 0
        assert (
            await queue.client.redis.exists(
                queue.client.redis_keys.file("default", file.id), queue.client.redis_keys.files("default")
            )
            == 0
        )
    finally:
        await queue.close()
        await storage.close()
