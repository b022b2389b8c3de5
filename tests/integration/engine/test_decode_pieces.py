"""Decodes of large videos in pieces: the same videos, and other jobs' steps between the pieces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLMagvit
from diffusers.models.autoencoders.autoencoder_kl_wan import WanDecoder3d
from harness.engine import DIFFUSERS_AND_NUMPY, SIDE, EngineHarness, EventRecorder, a_job, a_spec

from shared.config.model_spec import ModelSpec
from shared.config.request_limits import Defaults, Limits
from shared.job import Job
from shared.job_fields import Priority
from shared.tasks import Task
from worker.engine.fusion.module_proxy import SharedMethod
from worker.engine.pipelines import decode_pieces
from worker.engine.protocol import EngineEvent, ForwardDone
from worker.engine.scheduling import selection

pytestmark = [pytest.mark.filterwarnings(DIFFUSERS_AND_NUMPY), pytest.mark.usefixtures("shared_models")]
FRAMES = 17  # five latent frames


@dataclass
class Order(EventRecorder):
    """A recorder of the order of denoiser forwards and pieces; `at_first_piece` is called during the first piece."""

    order: list[str] = field(default_factory=list)
    at_first_piece: Callable[[], None] = lambda: None

    def on_event(self, event: EngineEvent) -> None:
        super().on_event(event)
        if isinstance(event, ForwardDone):
            self.order.append(f"step of {event.claim_key}")

    @property
    def pieces(self) -> int:
        return self.order.count("piece")


@pytest.fixture
def wan(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("wan-2.1-t2v")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Order:
    """Videos of `FRAMES` are large, and one piece runs between two forwards."""
    recorder = Order()
    run = SharedMethod.run

    def recorded(method: SharedMethod, *args: Any, **kwargs: Any) -> Any:
        if isinstance(method.module, decode_pieces.DecoderPieces):
            recorder.order.append("piece")
            if recorder.pieces == 1:
                recorder.at_first_piece()
        return run(method, *args, **kwargs)

    monkeypatch.setattr(SharedMethod, "run", recorded)
    monkeypatch.setattr(decode_pieces, "MAX_DECODE_PIXELS", SIDE * SIDE * FRAMES)
    monkeypatch.setattr(selection, "pieces_per_forward", lambda _piece_s, _forward_s: 1)
    return recorder


def video_spec(folder: Path) -> ModelSpec:
    limits = Limits(min_side=SIDE, multiple_of=16, max_frames=FRAMES, frames_multiple=4, max_images=4)
    defaults = Defaults(width=SIDE, height=SIDE, steps=2, guidance_scale=1.0, frames=FRAMES)
    return a_spec(folder, tasks=(Task.TEXT_TO_VIDEO,), limits=limits, defaults=defaults)


def a_video(name: str, **fields: Any) -> Job:
    values: dict[str, Any] = {"task": Task.TEXT_TO_VIDEO, "frames": FRAMES, "fps": 8, "guidance_scale": 1.0, "steps": 2}
    return a_job(name, **(values | fields))


def run(spec: ModelSpec, *jobs: Job, recorder: EventRecorder | None = None) -> EventRecorder:
    made = EngineHarness(spec, recorder=recorder).run(*jobs)
    failed = {key: ended.error.message for key, ended in made.finished.items() if ended.error}
    assert not failed
    return made


def assert_same(made: EventRecorder, expected: EventRecorder) -> None:
    assert made.images.keys() == expected.images.keys()
    for key, frames in expected.images.items():
        assert np.array_equal(made.images[key], frames), key


@pytest.mark.parametrize("family", ["wan-2.1-t2v", "wan-2.2-ti2v", "hunyuan-video", "cogvideox"])
def test_a_video_decoded_in_pieces_is_bit_identical(
    family: str, recorder: Order, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = video_spec(tiny_model(family))
    run(spec, a_video("one"), recorder=recorder)
    assert recorder.pieces > 1
    monkeypatch.setattr(decode_pieces, "MAX_DECODE_PIXELS", 2 * SIDE * SIDE * FRAMES)
    assert_same(recorder, run(spec, a_video("one")))


def test_a_vae_that_keeps_frames_in_its_layers_is_not_divided() -> None:
    """The pieces of two videos would get each other's frames, and those of a canceled job would stay."""
    small: dict[str, Any] = {"latent_channels": 4, "block_out_channels": (8, 8, 8, 8), "norm_num_groups": 4}
    small |= {"layers_per_block": 1}
    vae = AutoencoderKLMagvit(**small).eval()
    with torch.no_grad():
        vae.decoder(torch.zeros(1, 4, 1, 2, 2))
    assert any(getattr(layer, "prev_features", None) is not None for layer in vae.decoder.modules())
    assert decode_pieces.decoder_pieces(vae) is None


def test_steps_of_batch_mates_run_between_pieces(wan: Path, recorder: Order) -> None:
    run(video_spec(wan), a_video("short"), a_video("long", steps=9), recorder=recorder)
    first = recorder.order.index("piece")
    assert recorder.order[first : first + 12] == ["piece", "step of long"] * 5 + ["step of long"] * 2
    assert recorder.rows[:2] == [2, 2]


def test_a_job_of_higher_priority_preempts_a_decode(wan: Path, recorder: Order) -> None:
    harness = EngineHarness(video_spec(wan), recorder=recorder)
    urgent = a_video("urgent", frames=5, steps=4, priority=Priority.INTERACTIVE)
    recorder.at_first_piece = lambda: harness.submit_prepared(urgent)
    harness.submit(a_video("large"))
    with harness.started():
        recorder.wait_for(["large", "urgent"])
    pieces = [at for at, name in enumerate(recorder.order) if name == "piece"]
    steps = [at for at, name in enumerate(recorder.order) if name == "step of urgent"]
    assert len(pieces) == 5
    assert len(steps) == 4
    assert pieces[0] < steps[0]
    assert steps[-1] < pieces[1]


def test_a_job_can_be_canceled_during_its_decode(wan: Path, recorder: Order) -> None:
    harness = EngineHarness(video_spec(wan), recorder=recorder)
    recorder.at_first_piece = lambda: harness.engine.cancel("large")
    harness.submit(a_video("large"), a_video("mate", steps=4))
    with harness.started():
        recorder.wait_for(["large", "mate"])
    assert recorder.finished["large"].canceled
    assert recorder.pieces == 1 + 5
    assert recorder.finished["mate"].error is None


def test_a_piece_that_runs_out_of_memory_is_tried_again(
    wan: Path, recorder: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(video_spec(wan), a_video("one"))
    recorder.order.clear()
    forward = WanDecoder3d.forward

    def failing(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        if recorder.pieces == 3:
            raise torch.OutOfMemoryError
        return output

    monkeypatch.setattr(WanDecoder3d, "forward", failing)
    run(video_spec(wan), a_video("one"), recorder=recorder)
    assert recorder.pieces == 5 + 1
    assert_same(recorder, expected)
