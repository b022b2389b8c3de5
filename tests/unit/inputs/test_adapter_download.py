"""Which hosts adapters are fetched from, and their URLs on the hub."""

import errno
import json
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import pytest

from shared.config.adapters import AdapterChoice
from shared.config.settings import Settings
from shared.errors import FetchFailed, FetchInterrupted, FetchRefused
from shared.inputs.adapter_download import check_host, download, file_of, hub_listing_url, hub_url

HOSTS = ("huggingface.co", "*.hf.co")


@pytest.mark.parametrize("host", ["huggingface.co", "cdn.hf.co", "a.b.hf.co"])
def test_a_host_is_allowed_by_its_name_or_as_one_below_a_name(host: str) -> None:
    check_host(host, HOSTS)


@pytest.mark.parametrize("host", ["hf.co", "evilhf.co", "huggingface.co.example", "cdn.huggingface.co", "co", ""])
def test_another_host_is_refused_with_the_setting(host: str) -> None:
    with pytest.raises(FetchRefused, match=r"FUSEQUEUE_ADAPTER_HOSTS: huggingface\.co, \*\.hf\.co"):
        check_host(host, HOSTS)


def test_the_setting_is_a_list_of_names_in_lower_case() -> None:
    assert Settings(adapter_hosts="HuggingFace.co, *.hf.co").adapter_hosts == HOSTS  # type: ignore[arg-type]


@pytest.mark.parametrize("entry", ["*", "*.", "https://hf.co", "hf.co/x", "hf.co:443", "a b", "*.*.co"])
def test_an_entry_that_is_no_name_is_refused(entry: str) -> None:
    with pytest.raises(ValueError, match="a host name, or"):
        Settings(adapter_hosts=entry)  # type: ignore[arg-type]


def test_files_of_the_hub_have_the_url_of_their_revision() -> None:
    choice = AdapterChoice(hub="owner/ink", file="v1/ink one.safetensors", revision="refs/pr/1")
    base = "https://hub.example/owner/ink/resolve/refs%2Fpr%2F1"
    assert hub_url("https://hub.example/", choice, "v1/ink one.safetensors") == f"{base}/v1/ink%20one.safetensors"
    plain = AdapterChoice(hub="owner/ink")
    assert hub_listing_url("https://hub.example", plain) == "https://hub.example/api/models/owner/ink/revision/main"


def _listing(*names: str) -> bytes:
    return json.dumps({"siblings": [{"rfilename": name} for name in names]}).encode()


def test_a_repository_has_the_usual_file_or_a_single_one() -> None:
    assert file_of(_listing("a.safetensors", "pytorch_lora_weights.safetensors")) == "pytorch_lora_weights.safetensors"
    assert file_of(_listing("README.md", "v1/a.safetensors")) == "v1/a.safetensors"


@pytest.mark.parametrize(
    ("listing", "words"),
    [
        (_listing("README.md"), "0 safetensors files"),
        (_listing("a.safetensors", "b.safetensors"), "2 safetensors files: a.safetensors, b.safetensors; name one"),
        (b"<html>", "does not list"),
        (b"[]", "does not list"),
        (b'{"siblings": [{}]}', "does not list"),
        (b"[" * 100_000, "does not list"),
    ],
    ids=range(6),
)
def test_a_repository_without_a_clear_file_is_refused(listing: bytes, words: str) -> None:
    with pytest.raises(FetchFailed, match=words):
        file_of(listing)


async def test_a_full_disk_is_worth_a_repetition() -> None:
    class FullDisk(BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    class Guard:
        def check_url(self, url: str) -> Any:
            return SimpleNamespace(host="huggingface.co")

        async def download(self, url: str, add: Any, headers: Any) -> Any:
            await add(b"weights")
            return SimpleNamespace(status=200, headers={})

    guard: Any = Guard()
    with pytest.raises(FetchInterrupted, match="no room for the file: No space left on device"):
        await download(guard, "https://huggingface.co/a", FullDisk(), HOSTS)
