"""The frames that a job gets of its video, and the videos that end in an error."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from harness.engine import a_job
from harness.videos import a_plain_video, a_video_file, hidden, turned
from PIL import Image

from shared.errors import UnusableInput
from shared.inputs.validation import inspect
from shared.inputs.video_timing import frames_at, usual_fps
from shared.job import InputRef, Job
from shared.tasks import Task
from worker.engine.pipelines import input_videos
from worker.engine.pipelines.input_videos import LONGEST_S, decode_video


def job_of(data: bytes, **fields: Any) -> Job:
    """Return a job of all frames of a video at its own rate."""
    file = inspect(data, max_bytes=len(data), max_pixels=1, param="video")
    ref = InputRef(id="in_1", key="k", content_type=file.content_type, bytes=1, width=file.width, height=file.height)
    video = ref.model_copy(update={"frames": file.frames, "fps": file.fps})
    fps = fields.pop("fps", usual_fps(file.fps or 1.0))
    values = {"task": Task.VIDEO_TO_VIDEO, "frames": frames_at(file.frames, file.fps or 1.0, fps), "fps": fps}
    return a_job("x", **(values | {"video": video} | fields))


def numbers(data: bytes, **fields: Any) -> list[int]:
    """Return which frame of a video of `a_video_file` each frame of the job is."""
    frames, _ = decode_video(data, job_of(data, **fields))
    return [round((float(np.asarray(one).mean()) - START) / 20) for one in frames]


START = float(np.asarray(decode_video(one := a_video_file(1), job_of(one))[0][0]).mean())


@pytest.mark.parametrize(
    ("fps", "frames", "expected"),
    [
        (8, 9, range(9)),
        (8, 5, range(5)),
        (4, 5, (0, 2, 4, 6, 8)),
        (16, 9, (0, 0, 1, 1, 2, 2, 3, 3, 4)),
        (5, 6, (0, 2, 3, 5, 6, 8)),
    ],
)
def test_a_frame_is_the_one_that_shows_at_its_time(fps: int, frames: int, expected: Sequence[int]) -> None:
    assert numbers(a_video_file(), fps=fps, frames=frames) == list(expected)


def test_rates_that_are_no_whole_numbers_use_each_frame() -> None:
    """The time of each is rounded, and so is the rate of the job."""
    data = a_video_file(9, 30, times_s=tuple(at / 29.97 for at in range(9)))
    assert numbers(data, fps=30, frames=9) == list(range(9))


def test_frames_of_rates_that_no_job_has_are_picked_by_time() -> None:
    """Else the result would be slower than the video, or faster."""
    slow = a_video_file(3, 1, times_s=(0.0, 3.0, 6.0))
    assert numbers(slow, fps=1, frames=7) == [0, 0, 0, 1, 1, 1, 2]
    fast = a_video_file(9, 240)
    assert numbers(fast, fps=120, frames=4) == [0, 2, 4, 6]


def test_varying_frames_show_as_long_as_in_the_video() -> None:
    data = a_video_file(4, 10, times_s=(0.0, 0.4, 0.5, 0.6))
    assert numbers(data, fps=10, frames=6) == [0, 0, 0, 0, 1, 2]


def test_frames_are_upright_and_cropped_to_the_size_of_the_job() -> None:
    data = turned(a_video_file(2, size=(128, 64)))
    frames, _ = decode_video(data, job_of(data, width=64, height=128))
    assert [frame.size for frame in frames] == [(64, 128)] * 2
    plain = a_video_file(2, size=(128, 64))
    (upright, *_), _ = decode_video(plain, job_of(plain, width=128, height=64))
    right = np.asarray(upright.rotate(-90, expand=True), int)
    assert np.abs(np.asarray(frames[0], int) - right).max() <= 2


def test_frames_to_follow_keep_their_proportions() -> None:
    for size, expected in (((96, 48), (96, 48)), ((512, 256), (128, 64))):
        data = a_video_file(2, size=size)
        frames, _ = decode_video(data, job_of(data, task=Task.ANIMATE, width=64, height=64))
        assert [frame.size for frame in frames] == [expected] * 2


def test_many_frames_to_follow_have_the_size_of_the_job() -> None:
    """Twice its sides would be some hundred MiB for a usual job, of a file of some KiB."""
    data = a_video_file(30, size=(2048, 1024))
    frames, _ = decode_video(data, job_of(data, task=Task.ANIMATE, width=1024, height=512, frames=13))
    assert {frame.size for frame in frames} == {(1024, 512)}


def test_a_job_of_more_frames_than_memory_holds_is_refused() -> None:
    data = a_video_file(2)
    job = job_of(data).model_copy(update={"frames": 3000, "width": 1280, "height": 720})
    with pytest.raises(UnusableInput, match="the 3000 frames of the job take 7910 MiB; make fewer") as refused:
        decode_video(data, job)
    assert refused.value.param == "video"


@pytest.mark.parametrize("colour", ["red", "green", "blue", "white", "black"])
def test_colours_are_those_of_the_file(colour: str) -> None:
    data = a_plain_video(colour)
    (frame, *_), _ = decode_video(data, job_of(data))
    expected = np.asarray(Image.new("RGB", (1, 1), colour), int)
    assert np.abs(np.asarray(frame, int) - expected).max() <= 3


def test_odd_sides_are_decoded() -> None:
    data = a_video_file(3, size=(51, 35), pixels="yuv444p")
    frames, _ = decode_video(data, job_of(data))
    assert [frame.size for frame in frames] == [(64, 64)] * 3


def test_a_video_that_is_extended_is_read_to_its_end() -> None:
    data = a_video_file(9)
    frames, warnings = decode_video(data, job_of(data, task=Task.EXTEND_VIDEO, frames=17))
    assert (len(frames), {frame.size for frame in frames}, warnings) == (9, {(64, 64)}, ())


def test_what_has_no_effect_is_said() -> None:
    data = a_video_file(9, sound=True)
    _, warnings = decode_video(data, job_of(data, frames=5))
    assert [(warning.param, warning.message) for warning in warnings] == [
        ("video", "video: its first 5 of 9 frames at 8 fps are used"),
        ("video", "video: its sound is not used; the result has none of it"),
    ]
    assert decode_video(a_video_file(), job_of(a_video_file()))[1] == ()


def test_a_file_with_fewer_frames_than_it_says_is_refused() -> None:
    """Its last frame is not repeated instead."""
    data = a_video_file(9)
    job = job_of(data, frames=30)
    assert job.video is not None
    longer = job.model_copy(update={"video": job.video.model_copy(update={"frames": 30})})
    with pytest.raises(UnusableInput, match="fewer than the 30 of the job") as refused:
        decode_video(data, longer)
    assert refused.value.param == "video"


def test_frames_that_are_no_video_are_refused() -> None:
    data = a_video_file(9)
    at = data.index(b"mdat") + 4
    size = int.from_bytes(data[at - 8 : at - 4], "big")
    broken = data[:at] + b"\xa5" * (size - 8) + data[at - 8 + size :]
    with pytest.raises(UnusableInput) as refused:
        decode_video(broken, job_of(data))
    assert refused.value.param == "video"


@pytest.mark.parametrize("turn", [bytes, turned])
def test_frames_that_are_larger_than_the_file_says_are_refused(turn: Callable[[bytes], bytes]) -> None:
    data = turn(a_video_file(3, size=(128, 64)))
    at = data.index(b"stsd") + 4 + 40
    assert len(decode_video(data, job_of(data))[0]) == 3
    smaller = data[:at] + (96).to_bytes(2, "big") + data[at + 2 :]
    with pytest.raises(UnusableInput, match="frames of 128x64 pixels; its file says") as refused:
        decode_video(smaller, job_of(smaller))
    assert refused.value.param == "video"


def test_the_time_for_frames_that_are_hidden_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is read before each packet: it passes after 5 of the 8 that only the last frame needs."""
    data = hidden(a_video_file(9), 8)
    job = job_of(data)
    assert job.video is not None
    assert job.video.frames == 1
    clock = itertools.count()
    passing = SimpleNamespace(monotonic=lambda: next(clock) * LONGEST_S / 4.5)
    monkeypatch.setattr(input_videos, "time", passing)
    with pytest.raises(UnusableInput, match="takes more than 120 s"):
        decode_video(data, job)
    assert next(clock) == 6


def test_a_coding_that_is_not_known_is_refused() -> None:
    """The boxes name a decoder that exists, and the description for it does not fit."""
    data = a_video_file()
    at = data.index(b"stsd") + 12
    with pytest.raises(UnusableInput):
        decode_video(data[:at] + b"zzzz" + data[at + 4 :], job_of(data))


def test_the_size_in_the_frames_counts_and_not_that_of_the_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder allocates what the frames say."""
    monkeypatch.setattr("worker.engine.pipelines.input_videos.MAX_VIDEO_PIXELS", 96 * 80 - 1)
    with pytest.raises(UnusableInput, match=r"cannot be decoded|0 frames"):
        decode_video(a_video_file(), job_of(a_video_file()))
