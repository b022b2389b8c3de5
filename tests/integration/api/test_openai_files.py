"""Files, asked for with the unmodified `openai` SDK of a real API."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from io import BytesIO

import openai
import pytest
from harness.api_process import Server

from shared.queue import Queue
from shared.storage import connect
from worker.chores.maintenance import sweep_chunk

LINES = b'{"custom_id":"a","method":"POST","url":"/v1/jobs","body":{}}\n' * 3


@pytest.fixture
def server(start: Callable[..., Server]) -> Server:
    return start()


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_a_file_is_kept_listed_read_and_deleted(client: openai.OpenAI) -> None:
    """With the bytes that were sent, page by page, until it is gone."""
    made = [
        client.files.create(file=(f"{number}.jsonl", BytesIO(LINES + b"%d" % number)), purpose="batch")
        for number in range(5)
    ]
    first = made[0]
    assert (first.object, first.filename, first.bytes, first.status) == ("file", "0.jsonl", len(LINES) + 1, "processed")
    assert first.expires_at is not None
    assert first.expires_at > first.created_at
    assert client.files.retrieve(first.id) == first
    assert client.files.content(first.id).read() == LINES + b"0"
    assert [file.id for file in client.files.list(limit=2)] == [file.id for file in reversed(made)]
    assert [file.id for file in client.files.list(limit=2, order="asc")] == [file.id for file in made]

    assert client.files.delete(first.id).deleted
    for gone in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError) as told:
            gone(first.id)
        assert told.value.code == "not_found"


def test_what_is_no_batch_file_is_refused(start: Callable[..., Server]) -> None:
    """With the field at fault; nothing of it is stored."""
    with openai.OpenAI(base_url=f"{start(max_file_bytes='100000').url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.UnprocessableEntityError, match="purpose"):
            client.files.create(file=("a.jsonl", BytesIO(LINES)), purpose="vision")
        with pytest.raises(openai.UnprocessableEntityError, match="empty"):
            client.files.create(file=("a.jsonl", BytesIO(b"")), purpose="batch")
        for size in (100_001, 200_000):  # refused by what the file has, and by what the body is said to have
            with pytest.raises(openai.APIStatusError) as told:
                client.files.create(file=("a.jsonl", BytesIO(b"x" * size)), purpose="batch")
            assert told.value.status_code == 413
        assert client.files.list().data == []


def test_a_large_file_is_never_in_memory_whole(client: openai.OpenAI, server: Server) -> None:
    """Up and down: 96 MB leave the server's memory where it was."""
    client.files.create(file=("warm.jsonl", BytesIO(LINES)), purpose="batch")
    data = bytes(range(256)) * 4096 * 96
    before = server.reset_peak()
    made = client.files.create(file=("large.jsonl", BytesIO(data)), purpose="batch")
    with client.files.with_streaming_response.content(made.id) as answer:
        at = 0
        for piece in answer.iter_bytes():
            assert piece == data[at : at + len(piece)]
            at += len(piece)
    assert at == len(data)
    assert server.peak_kb() - before < 48 * 1024


async def test_files_outlive_neither_their_time_nor_a_half_done_upload(client: openai.OpenAI, server: Server) -> None:
    """The sweep removes what has expired, and what was stored of an upload that never ended."""
    made = client.files.create(file=("a.jsonl", BytesIO(LINES)), purpose="batch")
    queue, storage = Queue.connect(server.settings), connect(server.settings)
    try:
        await queue.files.begin("default", "file_half")
        await storage.put("files/default/file_half/00000.jsonl", b"x", "application/jsonl")
        for row in await queue.client.redis.zrange(queue.client.redis_keys.retention, 0, -1):
            await queue.client.redis.zadd(queue.client.redis_keys.retention, {row: 1})
        assert (await sweep_chunk(queue, storage)).removed == 2
        assert await storage.delete_prefix("files") == 0
        assert (
            await queue.client.redis.exists(
                queue.client.redis_keys.file("default", made.id), queue.client.redis_keys.files("default")
            )
            == 0
        )
    finally:
        await queue.close()
        await storage.close()
