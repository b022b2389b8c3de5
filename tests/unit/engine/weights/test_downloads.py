"""Downloads from the hub: the cached copy during an outage, and a limit on silence."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from diffusers import DiffusionPipeline
from huggingface_hub.errors import EntryNotFoundError
from tiny.safetensors_file import file_of

from shared.config.models_file import ModelSpec
from worker.engine.weights import downloads
from worker.engine.weights.downloads import fetch

Download = Callable[..., str]


@pytest.fixture
def spec(request: pytest.FixtureRequest) -> ModelSpec:
    return ModelSpec(id="m", source=f"org/{request.node.name}"[:60])  # downloads are kept by source


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Download], None]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    return lambda download: monkeypatch.setattr(DiffusionPipeline, "download", download)


def test_cached_files_serve_while_the_hub_cannot_be_reached(
    spec: ModelSpec, use: Callable[[Download], None], tmp_path: Path
) -> None:
    def download(_source: str, *, local_files_only: bool, **_options: Any) -> str:
        if not local_files_only:
            raise httpx.ReadTimeout("timed out")
        return str(tmp_path)

    use(download)
    assert fetch(spec) == tmp_path


def test_without_cached_files_the_error_of_the_hub_is_raised_with_its_cause(
    spec: ModelSpec, use: Callable[[Download], None]
) -> None:
    """Its cause decides whether the load is repeated."""

    def download(_source: str, *, local_files_only: bool, **_options: Any) -> str:
        if local_files_only:
            raise FileNotFoundError("nothing is cached")
        raise OSError("Cannot load model") from httpx.ConnectError("refused")

    use(download)
    with pytest.raises(OSError, match="Cannot load model") as raised:
        fetch(spec)
    assert isinstance(raised.value.__cause__, httpx.ConnectError)


def test_cached_files_do_not_replace_a_repository_that_is_gone(
    spec: ModelSpec, use: Callable[[Download], None], tmp_path: Path
) -> None:
    def download(_source: str, *, local_files_only: bool, **_options: Any) -> str:
        if not local_files_only:
            raise ValueError("only pickles")
        return str(tmp_path)

    use(download)
    with pytest.raises(ValueError, match="pickles"):
        fetch(spec)


def test_weights_that_a_checkpoint_has_are_not_downloaded(
    spec: ModelSpec, use: Callable[[Download], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their configurations are; another model of the same source gets all weights."""
    file = tmp_path / "a.safetensors"
    file.write_bytes(file_of({"double_blocks.0.img_mod.lin.weight": ([1], [0.0])}))
    index = {"transformer": ["diffusers", "FluxTransformer2DModel"], "vae": ["diffusers", "AutoencoderKL"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    asked: list[dict[str, Any]] = []

    def snapshot(_source: str, *, allow_patterns: list[str], **_options: Any) -> str:
        asked.append({"patterns": allow_patterns})
        return str(tmp_path)

    def download(_source: str, **options: Any) -> str:
        asked.append({name: value for name, value in options.items() if name in index})
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    use(download)
    fetch(spec.model_copy(update={"checkpoint": str(file)}))
    fetch(spec)
    assert asked == [{"patterns": ["model_index.json", "*/config.json"]}, {"transformer": None}, {}]
    file.write_bytes(b"<html>")
    with pytest.raises(ValueError, match=f"checkpoint {file}: its header cannot be read"):
        fetch(spec.model_copy(update={"checkpoint": str(file)}))


@pytest.mark.parametrize("local", [False, True])
def test_a_modular_pipeline_is_downloaded_with_its_parts_of_other_repositories(
    local: bool, spec: ModelSpec, use: Callable[[Download], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No code and no pickles; also from the cache, while the hub cannot be reached."""
    places = {"transformer": (spec.source, "transformer"), "vae": ("org/vae", ""), "guider": (None, "")}
    index = {
        name: ["diffusers", "Any", {"pretrained_model_name_or_path": source, "subfolder": subfolder, "revision": "r1"}]
        for name, (source, subfolder) in places.items()
    }
    (tmp_path / "modular_model_index.json").write_text(json.dumps({"_class_name": "FluxModularPipeline", **index}))
    asked: list[tuple[str, str | None, str]] = []

    def snapshot(
        source: str,
        *,
        revision: str | None,
        allow_patterns: list[str],
        local_files_only: bool,
        ignore_patterns: list[str] | None = None,
    ) -> str:
        assert (ignore_patterns is None) == (allow_patterns[0] != "*.json"), "a star matches folders too"
        if local and not local_files_only:
            raise httpx.ConnectError("refused")
        asked.append((source, revision, allow_patterns[0]))
        assert not any(pattern.endswith(("*", ".py", ".bin")) for pattern in allow_patterns)
        return str(tmp_path)

    def download(_source: str, **_options: Any) -> str:
        raise EntryNotFoundError("no model_index.json")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    use(download)
    assert fetch(spec) == tmp_path
    index_file, transformer, vae = asked
    assert index_file == (spec.source, None, "modular_model_index.json")
    assert transformer == (spec.source, None, "transformer/*.json")
    assert vae == ("org/vae", "r1", "*.json")


def test_a_download_without_data_is_given_up_and_awaited_again(
    spec: ModelSpec, use: Callable[[Download], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second one would wait for the same lock."""
    monkeypatch.setattr(downloads, "LOOK_EVERY_S", 0.02)
    data, starts = threading.Event(), []

    def download(_source: str, *, local_files_only: bool, **_options: Any) -> str:
        if local_files_only:
            raise FileNotFoundError("nothing is cached")
        starts.append(None)
        assert data.wait(60)
        return str(tmp_path)

    use(download)
    for _ in range(2):
        with pytest.raises(TimeoutError, match="no data"):
            fetch(spec, stall_s=0.1)
    data.set()
    assert fetch(spec, stall_s=60) == tmp_path
    assert len(starts) in (1, 2), "the last call can find the first download done"


def test_a_slow_download_that_makes_progress_is_not_given_up(
    spec: ModelSpec, use: Callable[[Download], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "LOOK_EVERY_S", 0.02)
    blobs = tmp_path / "models--org--m" / "blobs"
    blobs.mkdir(parents=True)
    looks: list[None] = []
    enough = threading.Event()

    def cached_files() -> frozenset[tuple[str, int]]:
        (blobs / str(len(looks))).touch()
        looks.append(None)
        if len(looks) > 50:
            enough.set()
        return original()

    def download(_source: str, **_options: Any) -> str:
        assert enough.wait(60)
        return str(tmp_path)

    original = downloads._cached_files
    monkeypatch.setattr(downloads, "_cached_files", cached_files)
    use(download)
    assert fetch(spec, stall_s=0.001) == tmp_path


def test_requests_to_the_hub_have_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those for which huggingface_hub passes none, such as that for a repository's metadata."""
    downloads.limit_requests()
    client = huggingface_hub.get_session()
    for given in (None, 3.0):
        request = client.build_request("GET", "http://hub.invalid/", timeout=given)
        for hook in client.event_hooks["request"]:
            hook(request)
        expected = huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT if given is None else given
        assert request.extensions["timeout"] == dict.fromkeys(("connect", "read", "write", "pool"), expected)
