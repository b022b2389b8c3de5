"""A checkpoint's file gives back what was written, and anything else is refused before it is used."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace

import pytest
import safetensors.torch
import torch

from shared.config.candidates import DroppedCandidate
from worker.engine.checkpoints import file_format
from worker.engine.checkpoints.checkpoint import Checkpoint, Identity
from worker.engine.checkpoints.file_format import CheckpointRefused, of_dropped, read, write
from worker.engine.checkpoints.mark_state import MarkState

IDENTITY = Identity("model", "job", 1, "cpu", "torch 2, diffusers 0")
STATE = {
    "forms": [{"tuple": [{"shape": [1, 4], "dtype": "float32"}]}],
    "calls": [["unet.forward", 0], ["unet.forward", 0]],
    "steps": [0, 0],
    "outputs": {"1": {"list": [{"tensor": "output.1.0", "host": True, "order": [0, 1]}]}},
    "schedulers": [{"last_step": 1, "attributes": {"_step_index": {"value": 2}}}],
    "generators": {"list": [{"tensor": "generators.0", "host": True, "order": [0]}]},
}
TENSORS = {
    "output.1.0": torch.tensor([[0.5, float("nan")]], dtype=torch.bfloat16),
    "generators.0": torch.arange(16, dtype=torch.uint8),
    "scalar": torch.tensor(3),
}
CHECKPOINT = Checkpoint(2, 4, STATE, TENSORS)


def test_a_file_gives_back_what_was_written() -> None:
    found = read(write(CHECKPOINT, IDENTITY), IDENTITY)
    assert (found.step, found.total, found.state) == (2, 4, STATE)
    assert found.tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert torch.equal(found.tensors[name].nan_to_num(7), tensor.nan_to_num(7)), name
        assert found.tensors[name].dtype == tensor.dtype


MARKS = MarkState(step=2, kept=(2, 0), scores=(0.5, None), dropped=(DroppedCandidate(candidate=1, step=2, score=0.25),))


@pytest.mark.parametrize("checkpoint", [replace(CHECKPOINT, marks=MARKS), of_dropped(2, MARKS)])
def test_a_file_of_a_candidate_has_the_scores_of_its_job(checkpoint: Checkpoint) -> None:
    found = read(write(checkpoint, IDENTITY), IDENTITY)
    assert (found.step, found.total, found.marks) == (checkpoint.step, checkpoint.total, MARKS)


def test_a_file_whose_candidates_are_not_those_of_a_job_is_refused() -> None:
    marks = MARKS.model_copy(update={"kept": (2, 1)})
    with pytest.raises(CheckpointRefused, match="is damaged: its candidates are not those of a job"):
        read(write(replace(CHECKPOINT, marks=marks), IDENTITY), IDENTITY)


def test_its_tensors_can_be_read_by_any_program() -> None:
    assert safetensors.torch.load(write(CHECKPOINT, IDENTITY)).keys() == TENSORS.keys()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": "other"}, "is of another model"),
        ({"job": "other"}, "is of another job"),
        ({"image": 0}, "is of another image"),
        ({"device": "cuda"}, "was made with cpu, not cuda"),
        ({"versions": "torch 3"}, "was made with torch 2, diffusers 0, not torch 3"),
    ],
)
def test_a_file_of_something_else_is_refused(change: dict[str, object], reason: str) -> None:
    with pytest.raises(CheckpointRefused, match=reason):
        read(write(CHECKPOINT, IDENTITY), replace(IDENTITY, **change))


def test_a_file_of_another_form_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_format, "FORMAT", file_format.FORMAT + 1)
    file = write(CHECKPOINT, IDENTITY)
    monkeypatch.undo()
    with pytest.raises(CheckpointRefused, match="has the form 3, and 2 is read"):
        read(file, IDENTITY)


def test_a_truncated_file_is_refused_wherever_it_ends() -> None:
    file = write(CHECKPOINT, IDENTITY)
    for length in (0, 7, 8, 100, len(file) // 2, len(file) - 1):
        with pytest.raises(CheckpointRefused):
            read(file[:length], IDENTITY)


def test_a_file_with_another_bit_is_refused_wherever_it_is() -> None:
    file = write(CHECKPOINT, IDENTITY)
    (length,) = struct.unpack_from("<Q", file)
    padding = range(8 + len(file[8 : 8 + length].rstrip()), 8 + length)
    for at in range(len(file)):
        if at not in padding:
            with pytest.raises(CheckpointRefused):
                read(file[:at] + bytes([file[at] ^ 1]) + file[at + 1 :], IDENTITY)


@pytest.mark.parametrize(
    "make",
    [
        lambda: b"",
        lambda: b"\x80\x04K\x01." * 20,  # a pickle
        lambda: safetensors.torch.save(TENSORS),
        lambda: safetensors.torch.save(TENSORS, {"note": "no checkpoint"}),
        lambda: struct.pack("<Q", 1 << 40) + b"{}",
        lambda: struct.pack("<Q", 2) + b"[]",
        lambda: struct.pack("<Q", 100_000) + b"[" * 100_000,
        lambda: struct.pack("<Q", 4) + b"null",
        lambda: safetensors.torch.save(TENSORS, {"fusequeue_checkpoint": "1", "header": "[" * 4_200_000}),
    ],
)
def test_a_file_that_is_no_checkpoint_is_refused(make: Callable[[], bytes]) -> None:
    with pytest.raises(CheckpointRefused):
        read(make(), IDENTITY)


@pytest.mark.parametrize(
    "change",
    [
        {"steps": [0, 3]},
        {"calls": [["unet.forward", 9]]},
        {"calls": ["unet"]},
        {"generators": []},
        {"more": 1},
    ],
)
def test_a_state_that_does_not_hold_together_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(CheckpointRefused, match="is damaged"):
        read(write(replace(CHECKPOINT, state={**STATE, **change}), IDENTITY), IDENTITY)


def test_steps_beyond_the_total_are_refused() -> None:
    with pytest.raises(CheckpointRefused, match="incomplete"):
        read(write(replace(CHECKPOINT, step=5), IDENTITY), IDENTITY)


def test_it_holds_no_prompt_and_no_pickle() -> None:
    file = write(CHECKPOINT, IDENTITY)
    (length,) = struct.unpack_from("<Q", file)
    header = json.loads(file[8 : 8 + length])
    assert set(header["__metadata__"]) == {"fusequeue_checkpoint", "header", "digest"}
    assert set(json.loads(header["__metadata__"]["header"])) == {"identity", "step", "total", "state"}
