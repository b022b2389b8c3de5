"""Whether a failed load is repeated or fails its jobs."""

from __future__ import annotations

import errno
import ssl
from pathlib import Path

import httpx
import pytest
import requests
import torch
from huggingface_hub import errors
from safetensors import SafetensorError

from shared.config.model_spec import ModelSpec
from shared.errors import LoadPostponed
from worker.engine.pipelines.loading import load_error, locate
from worker.engine.weights.load_failures import (
    LONGEST_DELAY_FAILURES,
    is_unmounted,
    passing_cause,
    retry_delay_s,
)

REQUEST = httpx.Request("GET", "http://hub.invalid/api/models/org/model")
PASSES, STAYS = True, False


class Hidden(Exception):
    """An error of another library, without a known base class."""


def http_error(status: int, kind: type[errors.HfHubHTTPError] = errors.HfHubHTTPError) -> Exception:
    return kind(f"status {status}", response=httpx.Response(status, request=REQUEST))  # type: ignore[arg-type]


def caused(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


def during(error: Exception, context: BaseException) -> Exception:
    error.__context__ = context
    return error


@pytest.mark.parametrize(
    ("error", "while_downloading", "while_loading"),
    [
        # the hub
        (httpx.ConnectError("refused"), PASSES, PASSES),
        (httpx.ReadTimeout("timed out"), PASSES, PASSES),
        (httpx.RemoteProtocolError("peer closed connection"), PASSES, PASSES),
        (requests.ConnectionError("reset"), PASSES, PASSES),
        (ssl.SSLCertVerificationError(1, "certificate verify failed"), PASSES, PASSES),
        (http_error(500), PASSES, PASSES),
        (http_error(503), PASSES, PASSES),
        (http_error(429), PASSES, PASSES),
        (http_error(408), PASSES, PASSES),
        (http_error(400), STAYS, STAYS),
        (http_error(404, errors.RepositoryNotFoundError), STAYS, STAYS),
        (http_error(401, errors.RepositoryNotFoundError), STAYS, STAYS),
        (http_error(403, errors.GatedRepoError), STAYS, STAYS),
        (http_error(404, errors.RevisionNotFoundError), STAYS, STAYS),
        (http_error(404, errors.RemoteEntryNotFoundError), STAYS, STAYS),
        (errors.FileMetadataError("no header of a hub; check your proxy"), PASSES, PASSES),
        (OSError("Consistency check failed: file should be of size 100 but has size 3"), PASSES, STAYS),
        (RuntimeError("Data processing error: CAS service error"), PASSES, STAYS),
        (errors.LocalEntryNotFoundError("not in the cache"), PASSES, STAYS),
        (caused(errors.LocalEntryNotFoundError("not in the cache"), httpx.ConnectError("refused")), PASSES, PASSES),
        (caused(errors.LocalEntryNotFoundError("not in the cache"), http_error(502)), PASSES, PASSES),
        (caused(OSError("Cannot load model org/model"), httpx.ConnectError("refused")), PASSES, PASSES),
        (caused(OSError("Cannot load model org/model"), http_error(404)), STAYS, STAYS),
        (during(Hidden("while handling"), httpx.ConnectError("refused")), PASSES, PASSES),
        (caused(errors.LocalEntryNotFoundError("?"), errors.OfflineModeIsEnabled("HF_HUB_OFFLINE")), STAYS, STAYS),
        (errors.HFValidationError("repo id must be in the form"), STAYS, STAYS),
        (ValueError("no safetensors, only pickles"), STAYS, STAYS),
        # files and machine
        (OSError(errno.EIO, "Input/output error"), PASSES, PASSES),
        (OSError(errno.ESTALE, "Stale file handle"), PASSES, PASSES),
        (OSError(errno.ENOTCONN, "Transport endpoint is not connected"), PASSES, PASSES),
        (OSError(errno.ENOSPC, "No space left on device"), PASSES, PASSES),
        (OSError(errno.EMFILE, "Too many open files"), PASSES, PASSES),
        (TimeoutError("no data of the download arrived"), PASSES, PASSES),
        (ConnectionResetError(errno.ECONNRESET, "reset"), PASSES, PASSES),
        (SafetensorError("I/O error: Input/output error (os error 5)"), PASSES, PASSES),
        (SafetensorError("Error while deserializing header: incomplete metadata"), STAYS, STAYS),
        (FileNotFoundError(errno.ENOENT, "No such file"), STAYS, STAYS),
        (PermissionError(errno.EACCES, "Permission denied"), STAYS, STAYS),
        (OSError("Error no file named diffusion_pytorch_model.safetensors found"), PASSES, STAYS),
        (MemoryError(), PASSES, PASSES),
        (torch.OutOfMemoryError("CUDA out of memory"), PASSES, PASSES),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), PASSES, PASSES),
        # the model
        (AttributeError("module diffusers has no attribute NoSuchPipeline"), STAYS, STAYS),
        (ImportError("sentencepiece is missing"), STAYS, STAYS),
        (RuntimeError("size mismatch for conv_in.weight"), PASSES, STAYS),
        (KeyError("unet"), STAYS, STAYS),
    ],
    ids=lambda value: f"{type(value).__name__}: {value}"[:50] if isinstance(value, Exception) else None,
)
def test_only_faults_of_network_disk_and_memory_pass(
    error: Exception, while_downloading: bool, while_loading: bool
) -> None:
    assert (passing_cause(error, downloading=True) is not None) is while_downloading
    assert (passing_cause(error) is not None) is while_loading


def test_a_cycle_of_causes_ends() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert passing_cause(first) is None


def test_the_reason_of_a_postponed_load_is_its_passing_cause() -> None:
    """What surrounds it is diffusers' general sentence."""
    spec = ModelSpec(id="m", source="org/model")
    error = caused(OSError("Cannot load model org/model: see the stacktrace"), httpx.ConnectError("Connection refused"))
    postponed = load_error(spec, error, downloading=True)
    assert isinstance(postponed, LoadPostponed)
    assert postponed.message == "model 'm' cannot be loaded from org/model now: Connection refused"
    assert (postponed.code, postponed.retryable, postponed.lacks_memory) == ("model_unavailable", True, False)
    memory = load_error(spec, torch.OutOfMemoryError("CUDA out of memory"))
    assert isinstance(memory, LoadPostponed)
    assert memory.lacks_memory


@pytest.mark.parametrize(
    ("failures", "jitter", "expected"),
    [
        (1, 0.5, 5),
        (2, 0.5, 10),
        (3, 0.5, 20),
        (1, 0.0, 3.75),
        (1, 1.0, 6.25),
        (LONGEST_DELAY_FAILURES, 0.5, 320),
        (10**6, 0.5, 320),
    ],
)
def test_the_delay_doubles_up_to_a_bound(failures: int, jitter: float, expected: float) -> None:
    assert retry_delay_s(failures, 5, jitter) == pytest.approx(expected)


def test_a_folder_with_nothing_beside_it_seems_not_to_be_mounted(tmp_path: Path) -> None:
    """A missing folder beside others is a wrong entry of the models file; an empty or missing place is no mount."""
    folder = tmp_path / "store" / "model"
    assert is_unmounted(folder)
    folder.parent.mkdir()
    assert is_unmounted(folder)
    with pytest.raises(LoadPostponed, match=r"mounted\?"):
        locate(ModelSpec(id="m", source=str(folder)))
    (folder.parent / "other").mkdir()
    assert not is_unmounted(folder)
    folder.mkdir()
    assert is_unmounted(folder)
    (folder / "config.json").touch()
    assert not is_unmounted(folder)
