"""The sound of a video that is enlarged: in step with its frames, as long as they are, or left out with a warning."""

from __future__ import annotations

import io
from fractions import Fraction

import av
import numpy as np
import pytest
from harness.engine import a_job
from harness.videos import a_plain_video, a_video_file

from shared.job import InputRef, Job
from shared.tasks import Task
from worker.engine.pipelines import input_videos
from worker.engine.pipelines.input_audio import decode_soundtrack
from worker.engine.pipelines.input_images import decode_inputs
from worker.engine.protocol import InputFiles

RATE = 16_000
SECONDS = 2.0


def with_sound(click_s: float, begins_s: float = 0.0) -> bytes:
    """Return a video of two seconds whose sound clicks once at a time, and begins at another."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        stream, track = output.add_stream("libx264", rate=8), output.add_stream("aac", rate=RATE)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        for _ in range(round(8 * SECONDS)):
            frame = av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8), format="rgb24")
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
        samples = np.zeros((1, round(RATE * (SECONDS - begins_s))), np.float32)
        samples[:, round(RATE * (click_s - begins_s)) :][:, :400] = 0.9
        sound = av.AudioFrame.from_ndarray(samples, format="fltp", layout="mono")
        sound.sample_rate, sound.pts, sound.time_base = RATE, round(RATE * begins_s), Fraction(1, RATE)
        output.mux(track.encode(sound))
        output.mux(track.encode())
    return file.getvalue()


@pytest.mark.parametrize(("click_s", "begins_s"), [(0.25, 0.0), (1.5, 0.0), (1.5, 1.0)])
def test_the_sound_is_in_step_with_the_frames(click_s: float, begins_s: float) -> None:
    """Also one that begins after the first frame."""
    sound, warnings = decode_soundtrack(with_sound(click_s, begins_s), SECONDS)
    assert sound is not None
    assert (sound.rate, warnings) == (RATE, ())
    assert int(np.abs(sound.samples[0]).argmax()) / RATE == pytest.approx(click_s, abs=0.03)


def test_the_sound_ends_with_the_frames_that_are_used() -> None:
    sound, _ = decode_soundtrack(with_sound(1.5), 0.5)
    assert sound is not None
    assert (sound.duration_s, float(np.abs(sound.samples).max()) < 0.1) == (0.5, True)


def test_a_video_without_a_sound_has_none() -> None:
    assert decode_soundtrack(a_plain_video("red"), SECONDS) == (None, ())


def test_a_sound_that_cannot_be_decoded_is_left_out_with_a_warning() -> None:
    data = with_sound(0.5).replace(b"\x40\x15", b"\x69\x15").replace(b"mp4a", b"zzzz")  # as if it were MP3
    sound, (warning,) = decode_soundtrack(data, SECONDS)
    assert (sound, warning.param) == (None, "video")
    assert "its sound cannot be decoded" in warning.message


def job_of(data: bytes, size: tuple[int, int], result: tuple[int, int]) -> Job:
    """Return a job that enlarges a video of `size` to a `result`."""
    video = InputRef(id="in_1", key="k", content_type="video/mp4", bytes=len(data), width=size[0], height=size[1])
    video = video.model_copy(update={"frames": 9, "fps": 8.0})
    return a_job("x", task=Task.UPSCALE_VIDEO, video=video, frames=9, fps=8, width=result[0], height=result[1])


@pytest.mark.parametrize(
    ("result", "much", "size"),
    [((192, 128), 0, (96, 64)), ((64, 64), 10**6, (96, 64)), ((64, 64), 0, (64, 64))],
)
def test_frames_to_enlarge_have_their_own_size_unless_a_smaller_result_spares_much_memory(
    result: tuple[int, int], much: int, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that few frames are scaled twice."""
    monkeypatch.setattr(input_videos, "MUCH_BYTES", much)
    data = a_video_file(9, 8, size=(96, 64), sound=True)
    inputs = decode_inputs(job_of(data, (96, 64), result), InputFiles(video=data))
    assert ({one.size for one in inputs.video}, len(inputs.video)) == ({size}, 9)
    assert (inputs.audio is not None, inputs.warnings) == (True, ())
