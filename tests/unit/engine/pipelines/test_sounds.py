"""Sounds for pipelines: their length, rate and channels."""

from __future__ import annotations

import io
import tracemalloc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import av
import diffusers
import numpy as np
import pytest
import torch
from harness.engine import an_audio_file

from shared.errors import InferenceFailed, NonFiniteLatents, UnusableInput
from shared.job import Job
from shared.tasks import Task
from worker.engine.outputs import Audio
from worker.engine.pipelines import input_images
from worker.engine.pipelines.input_audio import at_rate, decode_audio
from worker.engine.pipelines.input_images import InputImages
from worker.engine.pipelines.sounds import check_lyrics, cut_to, sound_arguments, to_audio
from worker.engine.pipelines.task_pipelines import call_parameters, supports

CODEC = SimpleNamespace(config=SimpleNamespace(sampling_rate=8000, audio_channels=2))


@pytest.fixture
def sound_job(make_job: Callable[..., Job]) -> Callable[..., Job]:
    def build(task: Task = Task.TEXT_TO_AUDIO, **fields: Any) -> Job:
        return make_job(**{"task": task, "width": 0, "height": 0, "duration_s": 2.0, **fields})

    return build


@pytest.mark.parametrize("count", [54, 55, 56, 57, 110, 1500])
def test_the_length_of_ace_step_is_one_that_it_rounds_alike(count: int, sound_job: Callable[..., Job]) -> None:
    """It fails for 2.2 seconds otherwise: it makes noise of 56 latents, and everything else of 55."""
    job = sound_job(duration_s=count / 25)
    made = sound_arguments(SimpleNamespace(vae=CODEC, latents_per_second=25.0), job, InputImages())["audio_duration"]
    latents = int(np.ceil(made * 25.0))
    assert np.ceil(latents / 25.0 * 25.0) == latents
    assert count <= latents <= count + 3
    assert sound_arguments(SimpleNamespace(vae=CODEC), job, InputImages())["audio_duration"] == job.duration_s


def test_a_sound_to_start_from_is_as_long_as_the_result(sound_job: Callable[..., Job]) -> None:
    start = decode_audio(an_audio_file(seconds=1.5), 2.0)
    job = sound_job(Task.AUDIO_INPAINT, repaint_start_s=0.5)
    made = sound_arguments(SimpleNamespace(vae=CODEC), job, InputImages(audio=start))
    assert made["src_audio"].shape == (2, 16_000)
    assert made["audio"].shape == (1, 2, 16_000)
    assert not made["src_audio"][:, 12_000:].any()
    assert (made["mask_start_seconds"], made["mask_end_seconds"]) == (0.5, 2.0)
    assert made["task_type"] == "repaint"


def test_the_strength_is_how_much_is_changed(sound_job: Callable[..., Job]) -> None:
    start = decode_audio(an_audio_file(), 2.0)
    job = sound_job(Task.AUDIO_TO_AUDIO, strength=0.25)
    made = sound_arguments(SimpleNamespace(vae=CODEC), job, InputImages(audio=start))
    assert (made["init_noise_level"], made["audio_cover_strength"]) == (0.25, 0.75)


@pytest.mark.parametrize("channels", [1, 2])
def test_another_rate_keeps_the_pitch_and_the_loudness(channels: int) -> None:
    tone = 0.5 * np.sin(2 * np.pi * 440 * np.arange(44_100) / 44_100).astype(np.float32)
    made = at_rate(Audio(tone[None], 44_100), 8000, channels, 1.0)
    assert made.shape == (channels, 8000)
    assert np.abs(np.fft.rfft(made[0])).argmax() == 440
    assert 0.48 < np.abs(made[:, 500:-500]).max() < 0.52


def test_a_sound_is_cut_at_the_end_that_is_needed() -> None:
    assert decode_audio(an_audio_file(seconds=1.5), 1.0).samples.shape == (2, 8000)
    assert cut_to(Audio(np.zeros((2, 17_000), np.float32), 8000), 2.0).duration_s == 2.0


def test_a_sound_is_decoded_at_48_khz_at_most_and_held_once() -> None:
    """Silence of 240 seconds at 192 kHz is a file of 51 KB, and took 1.6 GB."""
    data = silence(rate=192_000, seconds=20)
    sound = decode_audio(data, 15.0)
    assert (sound.rate, sound.samples.shape) == (48_000, (2, 720_000))
    tracemalloc.start()
    decode_audio(data, 15.0)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 1.3 * sound.nbytes


def silence(rate: int, seconds: int) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="flac") as container:
        stream = container.add_stream("flac", rate=rate, layout="stereo")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 2 * rate), np.int16), format="s16", layout="stereo")
        frame.sample_rate = rate
        for _ in range(seconds):
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def test_a_sound_is_resampled_once_for_all_images_of_a_job(
    sound_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, resampled = [], input_images.resampled

    def counted(sound: Audio, rate: int) -> Audio:
        calls.append(rate)
        return resampled(sound, rate)

    monkeypatch.setattr(input_images, "resampled", counted)
    inputs = InputImages(audio=Audio(np.ones((2, 44_100), np.float32), 44_100))
    first, second = (sound_arguments(SimpleNamespace(vae=CODEC), sound_job(), inputs) for _ in range(2))
    assert calls == [8000]
    first["src_audio"].zero_()  # a pipeline may
    assert second["src_audio"].any()


def test_a_task_that_changes_a_sound_fails_without_one(sound_job: Callable[..., Job]) -> None:
    with pytest.raises(InferenceFailed) as failed:
        sound_arguments(SimpleNamespace(vae=CODEC), sound_job(Task.AUDIO_TO_AUDIO), InputImages())
    assert failed.value.param == "audio"


def test_a_damaged_file_names_the_field() -> None:
    with pytest.raises(UnusableInput) as refused:
        decode_audio(b"RIFF\0\0\0\0WAVE", 1.0)
    assert refused.value.param == "audio"


def test_samples_that_are_no_numbers_fail_the_job() -> None:
    with pytest.raises(NonFiniteLatents):
        to_audio(torch.tensor([[0.5, float("nan")]]), 8000)
    assert to_audio(torch.tensor([2.0, -0.5]), 8000).samples.tolist() == [[1.0, -0.5]]


def test_a_model_that_needs_lyrics_says_so(sound_job: Callable[..., Job]) -> None:
    class Singer:
        def __call__(self, prompt: str, lyrics: str | None = None) -> None: ...

    class Band:
        def __call__(self, prompt: str, lyrics: str = "") -> None: ...

    check_lyrics(sound_job(), call_parameters(Band()))
    check_lyrics(sound_job(lyrics="la"), call_parameters(Singer()))
    with pytest.raises(InferenceFailed, match="needs some") as refused:
        check_lyrics(sound_job(), call_parameters(Singer()))
    assert refused.value.param == "lyrics"


@pytest.mark.parametrize(
    ("name", "tasks"),
    [
        ("AceStepPipeline", {Task.TEXT_TO_AUDIO, Task.AUDIO_TO_AUDIO, Task.AUDIO_INPAINT}),
        ("StableAudioPipeline", {Task.TEXT_TO_AUDIO, Task.AUDIO_TO_AUDIO}),
        ("StableAudio3Pipeline", {Task.TEXT_TO_AUDIO}),
        ("StableAudio3AudioToAudioPipeline", {Task.AUDIO_TO_AUDIO}),
        ("StableAudio3InpaintPipeline", {Task.AUDIO_INPAINT}),
        ("LTX2Pipeline", {Task.TEXT_TO_VIDEO}),
    ],
)
def test_a_pipeline_does_the_tasks_whose_inputs_its_call_takes(name: str, tasks: set[Task]) -> None:
    pipeline = object.__new__(getattr(diffusers, name))
    assert {task for task in Task if supports(task, pipeline)} == tasks


def test_ace_step_without_its_tokenizer_makes_no_covers() -> None:
    pipeline = object.__new__(diffusers.AceStepPipeline)
    vars(pipeline)["audio_tokenizer"] = None
    assert not supports(Task.AUDIO_TO_AUDIO, pipeline)
    assert supports(Task.AUDIO_INPAINT, pipeline)
