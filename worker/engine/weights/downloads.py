"""Downloads from the hub: bounded requests, a limit on silence, and the cached copy while the hub cannot be reached."""

import functools
import threading
import time
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import huggingface_hub
import structlog
from diffusers import DiffusionPipeline
from huggingface_hub import constants
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from shared.config.candidates import ScorerSpec
from shared.config.checkpoints import names_by_part, read_header
from shared.config.controls import ControlSpec
from shared.config.model_index import CLASSIC, MODULAR, read_index
from shared.config.model_spec import ModelSpec
from shared.config.refiners import RefinerSpec
from worker.engine.weights.load_failures import passing_cause
from worker.engine.weights.modular_downloads import download_modular

log = structlog.get_logger()

STALL_S = 120.0
LOOK_EVERY_S = 5.0

_LOADER: Any = DiffusionPipeline
_CONTROL_FILES = ("config.json", "*_model.safetensors", "*_model-*.safetensors", "*_model.safetensors.index.json")
_SCORER_FILES = ("*.json", "merges.txt", "model.safetensors", "model-*.safetensors")
_TIMEOUTS = ("connect", "read", "write", "pool")
_Spec = ModelSpec | ControlSpec | RefinerSpec | ScorerSpec
_Source = tuple[object, ...]
_running: dict[_Source, Future[Path]] = {}  # one that stalls is given up, and awaited again by the next load


@functools.cache
def limit_requests() -> None:
    """Give every request to the hub a timeout; for a repository's metadata, huggingface_hub waits without one."""
    default = huggingface_hub.get_session()
    seconds = float(constants.HF_HUB_DOWNLOAD_TIMEOUT)

    def limit(request: Any) -> None:
        given = request.extensions.get("timeout", {})
        request.extensions["timeout"] = {name: given.get(name) or seconds for name in _TIMEOUTS}

    hooks = {**default.event_hooks, "request": [*default.event_hooks["request"], limit]}
    huggingface_hub.set_client_factory(lambda: type(default)(event_hooks=hooks, follow_redirects=True, timeout=seconds))


def fetch(spec: _Spec, stall_s: float = STALL_S) -> Path:
    """Return the folder of a repository's files, downloaded if needed.

    While the hub cannot be reached, the cached files serve. Raises the download's error, or `TimeoutError` after
    `stall_s` without new data.
    """
    try:
        return _wait_for(spec, stall_s)
    except Exception as error:
        if passing_cause(error, downloading=True) is None:
            raise
        folder = _cached(spec)
        if folder is None:
            raise
        log.warning("hub_unavailable", model=spec.id, error=str(error)[:200], remedy="none: the cached files are used")
        return folder


def _cached(spec: _Spec) -> Path | None:
    """Return the folder of a repository's cached files, None if some are missing."""
    try:
        return _download(spec, local_files_only=True)
    except Exception:
        return None


def _download(spec: _Spec, *, local_files_only: bool) -> Path:
    if isinstance(spec, ControlSpec) and spec.kind != "redux":
        patterns: tuple[str, ...] = _CONTROL_FILES if spec.variant is None else ("config.json", f"*.{spec.variant}*")
        if spec.weight_name is not None:
            patterns = (
                f"*{spec.weight_name}",
                f"{spec.encoder_folder}/*.json",
                f"{spec.encoder_folder}/model.safetensors",
            )
        allowed = list(patterns)
        download: Any = huggingface_hub.snapshot_download
        return Path(
            download(spec.source, revision=spec.revision, allow_patterns=allowed, local_files_only=local_files_only)
        )
    if isinstance(spec, ScorerSpec):
        snapshot: Any = huggingface_hub.snapshot_download
        only = {"allow_patterns": [*_SCORER_FILES], "local_files_only": local_files_only}
        return Path(snapshot(spec.source, revision=spec.revision, **only))
    options = {"revision": spec.revision, "variant": spec.variant, "local_files_only": local_files_only}
    if isinstance(spec, ControlSpec):
        return Path(_LOADER.download(spec.source, use_safetensors=True, **options))
    if isinstance(spec, RefinerSpec):
        return Path(_LOADER.download(spec.source, use_safetensors=True, vae=None, **options))  # that of its model
    replaced = _replaced_parts(spec, local_files_only)
    unwanted = dict.fromkeys(replaced if spec.safety_checker else (*replaced, "safety_checker"))
    try:
        return Path(_LOADER.download(spec.source, use_safetensors=True, **options, **unwanted))
    except EntryNotFoundError as error:  # it has no index of a classic pipeline
        if isinstance(error, LocalEntryNotFoundError) and not local_files_only:  # the hub cannot be reached
            raise
        return download_modular(spec.source, spec.revision, spec.variant, replaced, local_files_only=local_files_only)


def _replaced_parts(spec: ModelSpec, local_files_only: bool) -> set[str]:
    """Return the parts whose weights are not downloaded, as files replace them; their configurations are."""
    replaced = set(spec.quantization.gguf if spec.quantization is not None else ())
    replaced |= set() if spec.vae is None else {"vae"}
    if not replaced and spec.checkpoint is None:
        return replaced
    download: Any = huggingface_hub.snapshot_download
    patterns = [CLASSIC, MODULAR, "*/config.json"]
    folder = download(spec.source, revision=spec.revision, allow_patterns=patterns, local_files_only=local_files_only)
    return replaced if spec.checkpoint is None else replaced | _parts_in(Path(spec.checkpoint), Path(folder))


def _parts_in(checkpoint: Path, folder: Path) -> set[str]:
    try:
        return set(names_by_part(read_header(checkpoint), read_index(folder)))
    except ValueError as error:
        raise ValueError(f"checkpoint {checkpoint}: {error}") from None


def _wait_for(spec: _Spec, stall_s: float) -> Path:
    """Wait for the download while it makes progress; join one that was given up."""
    source = _source_of(spec)
    future = _running.get(source)
    if future is None or future.done():
        future = _running[source] = _start(spec)
    seen, changed_s = _cached_files(), time.monotonic()
    while not wait([future], min(LOOK_EVERY_S, stall_s)).done:
        if (files := _cached_files()) != seen:
            seen, changed_s = files, time.monotonic()
        elif time.monotonic() - changed_s >= stall_s:
            raise TimeoutError(f"no data of the download arrived for {stall_s:g} s")
    return future.result()


def _source_of(spec: _Spec) -> _Source:
    """Return what decides which files are downloaded."""
    source = (spec.source, spec.revision, spec.variant)
    if isinstance(spec, ControlSpec):
        return (*source, spec.weight_name, spec.kind)
    if isinstance(spec, RefinerSpec | ScorerSpec):
        return (*source, type(spec))
    gguf = frozenset(spec.quantization.gguf) if spec.quantization is not None else frozenset()
    return (*source, spec.checkpoint, spec.vae is None, spec.safety_checker, gguf)


def _start(spec: _Spec) -> Future[Path]:
    future: Future[Path] = Future()

    def run() -> None:
        try:
            future.set_result(_download(spec, local_files_only=False))
        except BaseException as error:
            future.set_exception(error)

    # A daemon, unlike the threads of an executor: the process ends without it.
    threading.Thread(target=run, name="download", daemon=True).start()
    return future


def _cached_files() -> frozenset[tuple[str, int]]:
    """Return the files of the hub's cache, with the sizes of those that are being written."""
    files = Path(constants.HF_HUB_CACHE).glob("models--*/blobs/*")
    return frozenset((str(file), _written(file) if file.suffix == ".incomplete" else 0) for file in files)


def _written(file: Path) -> int:
    try:
        return file.stat().st_blocks
    except OSError:  # renamed meanwhile
        return 0
