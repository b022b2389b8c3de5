"""Errors of S3 servers: each names its remedy, and whether a repetition can succeed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from harness.ports import free_port
from harness.s3_process import admin

from shared.config.settings import Settings
from shared.errors import ConfigurationError, StorageUnavailable
from shared.storage import connect


def _s3(url: str, **changes: Any) -> Settings:
    credentials = {"s3_access_key_id": "test", "s3_secret_access_key": "test"}
    return Settings(**({"s3_bucket": "images", "s3_endpoint_url": url, **credentials} | changes))


@asynccontextmanager
async def _server(response: bytes | None) -> AsyncIterator[tuple[str, list[float]]]:
    """Run an HTTP server that sends `response` to each request, or nothing; yields its URL and the request times."""
    calls: list[float] = []
    open_calls: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        open_calls.add(task)
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                calls.append(time.monotonic())
                if response is None:
                    await asyncio.Event().wait()
                writer.write(response)
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", calls
    finally:
        server.close()
        for task in open_calls:
            task.cancel()
        await asyncio.gather(*open_calls)


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat requests at once: boto3 waits up to three seconds before it sends a request for the third time."""
    monkeypatch.setattr("botocore.endpoint.time", SimpleNamespace(sleep=lambda _seconds: None))


@pytest.mark.every_s3
async def test_missing_bucket_is_reported_by_every_call(s3_server: str) -> None:
    """It is an operator error, not a `NotFound` for the client."""
    storage = connect(_s3(s3_server, s3_bucket="nowhere"))
    for call in (
        storage.check(),
        storage.put("a/b", b"x", "image/png"),
        storage.head("a/b"),
        storage.read("a/b"),
        storage.delete_prefix("a"),
    ):
        with pytest.raises(StorageUnavailable, match=f"'nowhere' at {s3_server}.*FUSEQUEUE_S3_BUCKET"):
            await call
    await storage.close()


@pytest.mark.every_s3
async def test_a_versioned_bucket_keeps_one_probe_of_all_checks(s3_server: str) -> None:
    """Another one follows a fault."""
    client, bucket = admin(s3_server), "versioned"
    client.create_bucket(Bucket=bucket)
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})

    def probes() -> int:
        return len(client.list_object_versions(Bucket=bucket).get("Versions", ()))

    storage = connect(_s3(s3_server, s3_bucket=bucket))
    await storage.check(writes=False)
    assert probes() == 0
    for _ in range(3):
        await storage.check()
    assert probes() == 1
    rows = client.list_object_versions(Bucket=bucket)
    for row in (*rows["Versions"], *rows["DeleteMarkers"]):
        client.delete_object(Bucket=bucket, Key=row["Key"], VersionId=row["VersionId"])
    client.delete_bucket(Bucket=bucket)
    with pytest.raises(StorageUnavailable, match="does not exist"):
        await storage.check()
    client.create_bucket(Bucket=bucket)
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    await storage.check()
    assert probes() == 1
    await storage.close()


async def test_request_to_a_silent_server_times_out() -> None:
    async with _server(None) as (url, _):
        storage = connect(_s3(url, storage_timeout_s=0.4))
        begun = time.monotonic()
        with pytest.raises(StorageUnavailable, match=r"'images' at http://127.0.0.1"):
            await storage.head("a/b")
        assert time.monotonic() - begun < 30, "boto3 by itself would wait for minutes"
        await storage.close()


async def test_server_errors_are_retried_twice() -> None:
    """Three requests in all, then `StorageUnavailable`."""
    response = b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\n\r\n"
    async with _server(response) as (url, calls):
        storage = connect(_s3(url, storage_timeout_s=20))
        with pytest.raises(StorageUnavailable, match=r"'images' at http://127.0.0.1.* responded with 500"):
            await storage.head("a/b")
        assert len(calls) == 3
        await storage.close()


async def test_error_for_wrong_credentials_names_the_setting() -> None:
    body = b"<Error><Code>SignatureDoesNotMatch</Code><Message>no</Message></Error>"
    head = b"HTTP/1.1 403 Forbidden\r\ncontent-type: application/xml\r\ncontent-length: %d\r\n\r\n" % len(body)
    async with _server(head + body) as (url, _):
        storage = connect(_s3(url))
        with pytest.raises(StorageUnavailable, match="SignatureDoesNotMatch; check FUSEQUEUE_S3_ACCESS_KEY_ID"):
            await storage.read("a/b")
        await storage.close()


@pytest.mark.parametrize(
    ("status", "code", "lasting"),
    [
        ("413 Payload Too Large", "", True),
        ("400 Bad Request", "EntityTooLarge", True),
        ("403 Forbidden", "InvalidObjectState", True),
        ("400 Bad Request", "RequestTimeout", False),
        ("403 Forbidden", "", False),
        ("408 Request Timeout", "", False),
        ("429 Too Many Requests", "", False),
        ("503 Slow Down", "SlowDown", False),
    ],
)
async def test_a_refusal_that_a_repetition_cannot_change_is_not_retryable(
    status: str, code: str, lasting: bool
) -> None:
    body = f"<Error><Code>{code}</Code><Message>no</Message></Error>" if code else "<html>nginx</html>"
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/xml\r\ncontent-length: {len(body)}\r\n\r\n"
    async with _server((head + body).encode()) as (url, _):
        storage = connect(_s3(url))
        with pytest.raises(StorageUnavailable) as caught:
            await storage.read("a/b")
        assert caught.value.retryable == (not lasting)
        await storage.close()


async def test_error_for_an_unreachable_server_names_the_setting() -> None:
    storage = connect(_s3(f"http://127.0.0.1:{free_port()}"))
    with pytest.raises(StorageUnavailable, match="FUSEQUEUE_S3_ENDPOINT_URL"):
        await storage.read("a/b")
    await storage.close()


@pytest.mark.parametrize("missing", ["s3_access_key_id", "s3_secret_access_key"])
def test_half_of_the_credentials_is_a_configuration_error(missing: str) -> None:
    with pytest.raises(ConfigurationError, match=r"FUSEQUEUE_S3_ACCESS_KEY_ID and .*SECRET_ACCESS_KEY is missing"):
        connect(_s3("http://127.0.0.1:1", **{missing: None}))


def test_invalid_endpoint_is_a_configuration_error() -> None:
    with pytest.raises(ConfigurationError, match="FUSEQUEUE_S3_ENDPOINT_URL"):
        connect(_s3("http://object_store:9000"))  # boto3 allows no underscore
