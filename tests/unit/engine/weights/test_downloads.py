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
from huggingface_hub.utils import filter_repo_objects
from tiny.safetensors_file import file_of

from shared.config.model_spec import ModelSpec
from shared.config.refiners import RefinerSpec
from shared.config.weight_formats import Quantization
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


class Hub:
    """Repositories that are downloaded into one folder; only from the cache if it is `unreachable`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.unreachable = folder, False
        self.repositories: dict[str, dict[str, str]] = {}
        self.downloaded: dict[str, set[str]] = {}
        self.revisions: dict[str, set[str | None]] = {}

    def snapshot(
        self,
        source: str,
        *,
        revision: str | None,
        allow_patterns: list[str],
        local_files_only: bool,
        ignore_patterns: list[str] | None = None,
    ) -> str:
        if self.unreachable and not local_files_only:
            raise httpx.ConnectError("refused")
        self.revisions.setdefault(source, set()).add(revision)
        files = self.repositories.get(source, {})
        for name in filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            self.downloaded.setdefault(source, set()).add(name)
            (self.folder / name).parent.mkdir(exist_ok=True)
            (self.folder / name).write_text(files[name])
        return str(self.folder)


@pytest.fixture
def hub(use: Callable[[Download], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """A hub of modular pipelines."""
    made = Hub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made.snapshot)
    use(without_index)
    return made


def without_index(_source: str, **_options: Any) -> str:
    raise EntryNotFoundError("no model_index.json")


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
    configurations = ["model_index.json", "modular_model_index.json", "*/config.json"]
    assert asked == [{"patterns": configurations}, {"transformer": None}, {}]
    file.write_bytes(b"<html>")
    with pytest.raises(ValueError, match=f"checkpoint {file}: its header cannot be read"):
        fetch(spec.model_copy(update={"checkpoint": str(file)}))


def test_a_refiner_is_downloaded_without_the_vae_that_its_model_has(
    spec: ModelSpec, use: Callable[[Download], None], tmp_path: Path
) -> None:
    """A model of the same source gets all parts."""
    asked: list[dict[str, Any]] = []

    def download(source: str, **options: Any) -> str:
        asked.append({"source": source, **{name: options[name] for name in ("vae", "variant") if name in options}})
        return str(tmp_path)

    use(download)
    assert fetch(RefinerSpec(source=spec.source, variant="fp16")) == tmp_path
    fetch(spec)
    assert asked == [
        {"source": spec.source, "vae": None, "variant": "fp16"},
        {"source": spec.source, "variant": None},
    ]


def test_a_model_does_not_wait_for_the_download_of_a_refiner_of_its_source(
    spec: ModelSpec, use: Callable[[Download], None], tmp_path: Path
) -> None:
    """It needs more files."""
    began, ended = threading.Event(), threading.Event()

    def download(_source: str, **options: Any) -> str:
        if options["local_files_only"]:
            raise FileNotFoundError("nothing is cached")
        if "vae" in options:
            began.set()
            ended.wait(10)
        return str(tmp_path)

    use(download)
    waiting = threading.Thread(target=fetch, args=(RefinerSpec(source=spec.source),))
    waiting.start()
    try:
        assert began.wait(10)
        assert fetch(spec, stall_s=1.0) == tmp_path
    finally:
        ended.set()
        waiting.join()


@pytest.mark.parametrize("local", [False, True])
def test_a_modular_pipeline_is_downloaded_with_its_parts_of_other_repositories(
    local: bool, spec: ModelSpec, hub: Hub
) -> None:
    """No code and no pickles; also from the cache, while the hub cannot be reached."""
    places = {"transformer": (spec.source, "transformer"), "vae": ("org/vae", ""), "guider": (None, "")}
    index = {
        name: ["diffusers", "Any", {"pretrained_model_name_or_path": source, "subfolder": subfolder, "revision": "r1"}]
        for name, (source, subfolder) in places.items()
    }
    (hub.folder / "modular_model_index.json").write_text(json.dumps({"_class_name": "FluxModularPipeline", **index}))
    of_parts = {"transformer/config.json": "t", "vae.py": "code", "transformer/model.bin": "pickle"}
    hub.repositories = {spec.source: of_parts, "org/vae": {"config.json": "v", "more/config.json": "m"}}
    hub.unreachable = local
    assert fetch(spec) == hub.folder
    assert hub.downloaded == {spec.source: {"transformer/config.json"}, "org/vae": {"config.json"}}
    assert hub.revisions == {spec.source: {None}, "org/vae": {"r1"}}


WEIGHTS = ("a", "b", "a.fp16", "a-00001-of-00002.fp16", "a.fp16-00001-of-00002")
"""Names of files with weights, without the suffix."""


@pytest.mark.parametrize(
    ("changes", "of_part", "weights"),
    [
        ({}, None, {"a", "b"}),
        ({"variant": "fp16"}, None, {"a.fp16", "a-00001-of-00002.fp16", "a.fp16-00001-of-00002"}),
        ({}, "fp16", {"a.fp16", "a-00001-of-00002.fp16", "a.fp16-00001-of-00002"}),
        ({"variant": "bf16"}, "fp16", {"a", "b"}),
        ({"variant": "fp16", "quantization": Quantization(gguf={"transformer": "/a.gguf"})}, None, set()),
    ],
)
@pytest.mark.parametrize("subfolder", ["transformer", ""])
def test_parts_of_a_modular_pipeline_are_downloaded_with_the_weights_that_are_loaded(
    changes: dict[str, Any], of_part: str | None, weights: set[str], subfolder: str, spec: ModelSpec, hub: Hub
) -> None:
    """Of a variant in place of plain ones; none that a GGUF file replaces."""
    place = {"pretrained_model_name_or_path": "org/part", "subfolder": subfolder, "variant": of_part}
    index = {"_class_name": "FluxModularPipeline", "transformer": ["diffusers", "Any", place]}
    (hub.folder / "modular_model_index.json").write_text(json.dumps(index))
    inside = f"{subfolder}/".lstrip("/")
    hub.repositories = {"org/part": dict.fromkeys([f"{inside}{name}.safetensors" for name in WEIGHTS], "")}
    hub.repositories["org/part"][f"{inside}config.json"] = "{}"
    fetch(spec.model_copy(update=changes))
    expected = {f"{inside}{name}.safetensors" for name in weights}
    assert hub.downloaded["org/part"] == {f"{inside}config.json"} | expected


def test_a_safety_checker_that_is_not_loaded_is_not_downloaded(
    spec: ModelSpec, use: Callable[[Download], None], tmp_path: Path
) -> None:
    """A gigabyte for Stable Diffusion 1.5; another model of the same source gets it."""
    asked: list[dict[str, Any]] = []

    def download(_source: str, **options: Any) -> str:
        asked.append({name: value for name, value in options.items() if name == "safety_checker"})
        return str(tmp_path)

    use(download)
    fetch(spec.model_copy(update={"safety_checker": False}))
    fetch(spec)
    assert asked == [{"safety_checker": None}, {}]


def test_weights_that_files_replace_are_not_downloaded(
    spec: ModelSpec, hub: Hub, use: Callable[[Download], None]
) -> None:
    """Those of a VAE and of a denoiser in GGUF; their configurations are."""
    files = {"vae/config.json": "{}", "vae/model.safetensors": "", "transformer/config.json": "{}"}
    hub.repositories, asked = {spec.source: files}, []

    def download(_source: str, **options: Any) -> str:
        asked.append({name for name, value in options.items() if value is None})
        return str(hub.folder)

    use(download)
    fetch(spec.model_copy(update={"vae": "/vae", "quantization": Quantization(gguf={"transformer": "/a.gguf"})}))
    assert asked[0] >= {"vae", "transformer"}
    assert hub.downloaded == {spec.source: {"vae/config.json", "transformer/config.json"}}


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
