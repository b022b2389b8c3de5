"""S3 servers other than AWS's: objects arrive as they are sent, and one that stores other bytes is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.odd_s3 import (
    DAMAGES,
    FIRST_NAME_GONE,
    IGNORES_RANGES,
    KEEPS_FRAMES,
    KEEPS_NOTHING,
    NAMES_ANOTHER_KEY,
    NAMES_NO_KEY,
    NEEDS_MD5,
    REFUSES_FRAMES,
    SUMS_WHOLE,
    OddS3,
    odd_s3,
)

from api.readiness import Readiness
from shared.config.settings import Settings
from shared.errors import ConfigurationError, StorageRefused, StorageUnavailable
from shared.queue import Queue
from shared.storage import Storage, connect
from shared.storage.s3_client import checksum_mode

IMAGE = b"\x89PNG" + bytes(range(256)) * 11

SUPPORTED = {"s3_checksums": "when_supported"}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OddS3]:
    for name in ("AWS_REQUEST_CHECKSUM_CALCULATION", "AWS_RESPONSE_CHECKSUM_VALIDATION"):
        monkeypatch.delenv(name, raising=False)
    with odd_s3(tmp_path) as running:
        monkeypatch.setenv("AWS_CA_BUNDLE", running.ca_file)
        yield running


@pytest.fixture
async def open_storage(server: OddS3) -> Any:
    opened: list[Storage] = []

    def build(**changes: Any) -> Storage:
        values = {"s3_bucket": "images", "s3_access_key_id": "test", "s3_secret_access_key": "test"}
        opened.append(connect(Settings(**values, s3_endpoint_url=server.url, **changes)))
        return opened[-1]

    yield build
    for storage in opened:
        await storage.close()


Open = Callable[..., Storage]


@pytest.mark.parametrize("oddity", [KEEPS_FRAMES, REFUSES_FRAMES, SUMS_WHOLE, NEEDS_MD5])
async def test_objects_of_an_odd_server_are_those_that_were_sent(
    server: OddS3, open_storage: Open, oddity: str
) -> None:
    server.oddities = {oddity}
    storage = open_storage()
    await storage.check()
    await storage.put("jobs/a/0.png", IMAGE, "image/png")
    assert server.objects == {"jobs/a/0.png": IMAGE}
    assert "content-encoding" not in server.puts[-1]
    assert await storage.read("jobs/a/0.png") == IMAGE
    assert await storage.read("jobs/a/0.png", 4, 1000) == IMAGE[4:1000]
    assert b"".join([chunk async for chunk in storage.stream("jobs/a/0.png", 2000)]) == IMAGE[2000:]
    assert await storage.delete_prefix("jobs/a") == 1


@pytest.mark.parametrize(
    ("oddity", "settings", "message"),
    [
        (KEEPS_FRAMES, SUPPORTED, r"stored other bytes than it was sent: b'400\\r\\n.*FUSEQUEUE_S3_CHECKSUMS"),
        (REFUSES_FRAMES, SUPPORTED, "refused PutObject with MissingContentLength"),
        (IGNORES_RANGES, {}, "returned other bytes for a range of an object: 1024 instead of 100"),
    ],
)
async def test_a_server_that_changes_objects_is_refused(
    server: OddS3, open_storage: Open, oddity: str, settings: dict[str, str], message: str
) -> None:
    """Nothing of a check is left; its repetitions write nothing more while the server is as it was."""
    server.oddities = {oddity}
    storage = open_storage(**settings)
    for _ in range(3):
        with pytest.raises(StorageUnavailable, match=message):
            await storage.check()
    assert server.objects == {}
    assert len(server.puts) == (3 if oddity == REFUSES_FRAMES else 1)
    await storage.check(writes=False)


@pytest.mark.parametrize("oddity", [NAMES_NO_KEY, NAMES_ANOTHER_KEY])
async def test_a_deletion_that_fails_without_its_key_is_no_success(
    server: OddS3, open_storage: Open, oddity: str
) -> None:
    """Otherwise its object is forgotten, and stays for ever."""
    storage = open_storage()
    await storage.put("a/b", IMAGE, "image/png")
    server.oddities = {oddity}
    with pytest.raises(StorageUnavailable, match="AccessDenied"):
        await storage.delete_prefix("a")
    assert server.objects == {"a/b": IMAGE}


async def test_an_api_before_a_server_that_changes_objects_is_not_ready(
    server: OddS3, open_storage: Open, queue: Queue
) -> None:
    server.oddities = {KEEPS_FRAMES}
    readiness = Readiness(queue, open_storage(**SUPPORTED))
    assert await readiness.faults() == ["storage: returns other bytes than it was sent"]
    assert await Readiness(queue, open_storage()).faults() == []


async def test_damage_on_the_way_is_noticed_where_the_server_keeps_checksums(server: OddS3, open_storage: Open) -> None:
    """With `when_supported` a whole read is compared with the checksum, a range is not."""
    server.oddities = {SUMS_WHOLE}
    storage = open_storage(**SUPPORTED)
    await storage.put("a/b", IMAGE, "image/png")
    assert "x-amz-trailer" in server.puts[-1]
    assert await storage.read("a/b", 4, 1000) == IMAGE[4:1000]
    assert await storage.read("a/b") == IMAGE
    server.oddities = {DAMAGES}
    with pytest.raises(StorageRefused, match="returned a damaged object"):
        await storage.read("a/b")


async def test_a_probe_that_another_process_deletes_is_repeated_under_another_name(
    server: OddS3, open_storage: Open
) -> None:
    """Processes that check at the same time can share a name; a server that loses the second one too is refused."""
    server.oddities = {FIRST_NAME_GONE}
    await open_storage().check()
    assert len(server.puts) == len(set(server.names)) == 2
    server.oddities = {KEEPS_NOTHING}
    with pytest.raises(StorageUnavailable, match="has not kept an object"):
        await open_storage().check()
    assert len(server.puts) == 4


@pytest.fixture
def configure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Set a variable of boto3, or the lines of its file."""

    def write(variable: str, value: str) -> None:
        if variable == "AWS_CONFIG_FILE":
            (tmp_path / "config").write_text(f"[default]\n{value}\n")
            value = str(tmp_path / "config")
        monkeypatch.setenv(variable, value)

    return write


@pytest.mark.parametrize(
    ("configured", "settings", "trailer"),
    [
        (("AWS_REQUEST_CHECKSUM_CALCULATION", "WHEN_SUPPORTED"), {}, True),
        (("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required"), SUPPORTED, True),
        (("AWS_CONFIG_FILE", "request_checksum_calculation = when_supported"), {}, True),
        (("AWS_CONFIG_FILE", ""), {}, False),
    ],
)
async def test_the_setting_goes_before_the_configuration_of_boto3_and_that_before_the_endpoint(
    server: OddS3, open_storage: Open, configure: Any, configured: tuple[str, str], settings: Any, trailer: bool
) -> None:
    configure(*configured)
    await open_storage(**settings).put("a/b", IMAGE, "image/png")
    assert ("x-amz-trailer" in server.puts[-1]) == trailer


@pytest.mark.parametrize(
    ("endpoint", "mode"),
    [
        ("https://s3.eu-west-1.amazonaws.com", "when_supported"),
        ("https://s3.cn-north-1.amazonaws.com.cn", "when_supported"),
        ("https://s3.eusc-de-east-1.amazonaws.eu", "when_supported"),
        ("https://s3.eu-west-1.api.aws", "when_supported"),
        ("https://amazonaws.com.example.org", "when_required"),
        ("https://notamazonaws.com", "when_required"),
        ("http://10.0.0.1:9000", "when_required"),
    ],
)
def test_only_servers_of_aws_are_sent_checksums_by_default(endpoint: str, mode: str) -> None:
    assert checksum_mode(None, None, endpoint) == mode


async def test_an_endpoint_of_boto3_is_no_server_of_aws(server: OddS3, monkeypatch: pytest.MonkeyPatch) -> None:
    """`AWS_ENDPOINT_URL_S3` instead of the setting: no trailers, and the bucket is in the path."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.url)
    storage = connect(Settings(s3_bucket="images", s3_access_key_id="test", s3_secret_access_key="test"))
    await storage.put("a/b", IMAGE, "image/png")
    assert server.objects == {"a/b": IMAGE}
    assert "x-amz-trailer" not in server.puts[-1]
    await storage.close()


def test_an_invalid_variable_of_boto3_is_a_configuration_error(
    open_storage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "sometimes")
    with pytest.raises(ConfigurationError, match="sometimes"):
        open_storage()
