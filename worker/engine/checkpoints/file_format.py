"""The file of a checkpoint: safetensors, with the rest as JSON in its metadata, and a digest of all of it."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import safetensors.torch
import torch
from pydantic import ValidationError
from safetensors import SafetensorError

from worker.engine.checkpoints.checkpoint import Checkpoint, Identity
from worker.engine.checkpoints.mark_state import MarkState

FORMAT = 2
"""Version of the file's form; files of any other are refused."""

_FORM_KEY, _HEADER_KEY, _DIGEST_KEY = "fusequeue_checkpoint", "header", "digest"
_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 4 * 1024 * 1024
_STATE = {"forms": list, "calls": list, "steps": list, "outputs": dict, "schedulers": list, "generators": dict}
_PREDICTED = "predicted"
"""Part of the state of a candidate that has not been compared since its last step."""


class CheckpointRefused(Exception):
    """A file from which an image cannot continue; the message completes "the checkpoint ..."."""


def write(checkpoint: Checkpoint, identity: Identity) -> bytes:
    """Return the file of a checkpoint; waits until its tensors are on the host."""
    checkpoint.wait()
    parts = {
        "identity": asdict(identity),
        "step": checkpoint.step,
        "total": checkpoint.total,
        "state": checkpoint.state,
    }
    if checkpoint.marks is not None:
        parts["marks"] = checkpoint.marks.model_dump(mode="json")
    header = json.dumps(parts, separators=(",", ":"))
    metadata = {
        _FORM_KEY: str(FORMAT),
        _HEADER_KEY: header,
        _DIGEST_KEY: _digest(header, checkpoint.tensors),
    }
    return safetensors.torch.save(dict(checkpoint.tensors), metadata)


def of_dropped(step: int, marks: MarkState) -> Checkpoint:
    """Return the checkpoint of a candidate that was dropped after `step`: nothing of it is computed any more."""
    return Checkpoint(step, step, {name: kind() for name, kind in _STATE.items()}, {}, marks=marks)


def read(data: bytes, identity: Identity) -> Checkpoint:
    """Return the checkpoint of a file, or raise `CheckpointRefused`: nothing of it is used before all is checked."""
    metadata = _metadata(data)
    form = metadata.get(_FORM_KEY)
    if form != str(FORMAT):
        raise CheckpointRefused(f"has the form {form}, and {FORMAT} is read" if form else "is no checkpoint")
    try:
        tensors = safetensors.torch.load(data)
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointRefused(f"is damaged: {str(error)[:120]}") from None
    text = metadata.get(_HEADER_KEY, "")
    if metadata.get(_DIGEST_KEY) != _digest(text, tensors):
        raise CheckpointRefused("is damaged: its digest does not match")
    header = _decoded(text)
    _check_identity(header.get("identity"), identity)
    return _checked(header, tensors)


def _metadata(data: bytes) -> Mapping[str, str]:
    """Return the metadata of a safetensors file."""
    if len(data) < _LENGTH.size:
        raise CheckpointRefused("is truncated")
    (length,) = _LENGTH.unpack_from(data)
    if length > _MAX_HEADER_BYTES:
        raise CheckpointRefused("is no checkpoint")
    if _LENGTH.size + length > len(data):
        raise CheckpointRefused("is truncated")
    header = _decoded(data[_LENGTH.size : _LENGTH.size + length])
    metadata = header.get("__metadata__")
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointRefused("is no checkpoint")
    return metadata


def _decoded(text: str | bytes) -> dict[str, Any]:
    try:
        decoded = json.loads(text)
    except (ValueError, RecursionError):
        raise CheckpointRefused("is damaged: its header is no JSON") from None
    if not isinstance(decoded, dict):
        raise CheckpointRefused("is damaged: its header is no JSON object")
    return decoded


def _check_identity(found: Any, wanted: Identity) -> None:
    if not isinstance(found, dict) or found.keys() != asdict(wanted).keys():
        raise CheckpointRefused("is damaged: it does not say what it belongs to")
    for name, value in asdict(wanted).items():
        if found[name] != value:
            kind = "was made with" if name in ("device", "versions") else f"is of another {name}:"
            raise CheckpointRefused(f"{kind} {str(found[name])[:80]}, not {value}")


def _checked(header: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Checkpoint:
    match header:
        case {"step": int(step), "total": int(total), "state": dict(state)} if 0 <= step <= total:
            pass
        case _:
            raise CheckpointRefused("is damaged: its state is incomplete")
    if state.keys() - {_PREDICTED} != _STATE.keys() or any(
        not isinstance(state[name], kind) for name, kind in _STATE.items()
    ):
        raise CheckpointRefused("is damaged: its state has other parts")
    forms, schedulers = range(len(state["forms"])), range(len(state["schedulers"]))
    calls_known = all(isinstance(call, list) and len(call) == 2 and call[1] in forms for call in state["calls"])
    if not calls_known or not all(number in schedulers for number in state["steps"]):
        raise CheckpointRefused("is damaged: its state refers to what it does not have")
    return Checkpoint(step, total, state, tensors, marks=_marks(header.get("marks")))


def _marks(found: Any) -> MarkState | None:
    try:
        return None if found is None else MarkState.model_validate(found)
    except ValidationError:
        raise CheckpointRefused("is damaged: its candidates are not those of a job") from None


def _digest(header: str, tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.blake2b(header.encode(), digest_size=32)
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        values: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        digest.update(values)
    return digest.hexdigest()
