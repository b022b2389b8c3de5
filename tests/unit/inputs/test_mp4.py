"""What the boxes of an MP4 or MOV say, and which files are refused."""

from __future__ import annotations

import struct
import tracemalloc
from typing import Any

import pytest
from harness.videos import a_plain_video, a_video_file, hidden, turned

from shared.errors import InputRejected
from shared.inputs.validation import ImageFile, inspect

LIMITS: Any = {"max_bytes": 10_000_000, "max_pixels": 1, "param": "video"}


def facts(file: ImageFile) -> tuple[Any, ...]:
    return file.content_type, file.width, file.height, file.frames, file.fps


def test_a_video_is_described_without_decoding() -> None:
    video = a_video_file(7, 16, size=(96, 80))
    assert facts(inspect(video, **LIMITS)) == ("video/mp4", 96, 80, 7, 16.0)
    assert facts(inspect(turned(video), **LIMITS))[1:3] == (80, 96)
    movie = inspect(a_video_file(3, container="mov"), **LIMITS)
    assert (movie.content_type, movie.frames) == ("video/quicktime", 3)


def test_the_rate_of_varying_frames_is_their_mean() -> None:
    video = inspect(a_video_file(4, 10, times_s=(0.0, 0.1, 0.5, 0.7)), **LIMITS)
    assert video.frames == 4
    assert video.fps == pytest.approx(4 / 0.8, rel=0.15)  # the last one lasts as long as the encoder chooses


def test_a_frame_that_shows_for_long_counts_where_frames_are_coded_out_of_order() -> None:
    """As in recordings of a screen: the table has the times of decoding."""
    times = (*(at / 8 for at in range(16)), 10.0, 10.125)
    data = a_video_file(18, 8, times_s=times)
    assert inspect(data, **LIMITS).fps == pytest.approx(18 / 10.25, rel=0.05)
    assert inspect(VIDEO, **LIMITS).fps == 8.0  # 3 frames, in a track that is as long as 4
    unknown = with_number(data, b"mdhd", 16, 2**32 - 1)
    assert inspect(unknown, **LIMITS).fps > 2


def test_frames_that_an_edit_list_hides_are_counted_apart() -> None:
    video = inspect(hidden(a_video_file(9), 7), **LIMITS)
    assert (video.frames, video.hidden_frames) == (2, 7)


def test_metadata_are_overwritten() -> None:
    """Places and devices of phones' videos; the rest of the file keeps its bytes."""
    video = a_video_file(3, metadata="secret place")
    assert b"secret place" in video
    stripped = inspect(video, **LIMITS).data
    assert b"secret place" not in stripped
    assert len(stripped) == len(video)
    assert inspect(stripped, **LIMITS).data is stripped


def test_metadata_take_the_memory_of_one_more_file() -> None:
    video, head = inspect(a_video_file(3), **LIMITS).data, struct.pack(">I", 8 + 4_000_000)
    data = video + head + b"uuid" + b"\1" * 4_000_000
    tracemalloc.start()
    try:
        stripped = inspect(data, **LIMITS).data
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert stripped == video + head + b"free" + bytes(4_000_000)
    assert peak < 1.2 * len(data)


def with_number(video: bytes, box: bytes, offset: int, number: int) -> bytes:
    at = video.index(box) + 4 + offset
    return video[:at] + struct.pack(">I", number) + video[at + 4 :]


VIDEO = a_plain_video("red")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (VIDEO.replace(b"\0\0\0\0vide", b"\0\0\0\0soun"), "has no video track"),
        (VIDEO.replace(b"avc1", b"mjpg").replace(b"mjpg", b"avc1", 1), "is coded as mjpg; send H.264"),
        (VIDEO.replace(b"moov", b"junk", 1), "0 moov boxes"),
        (with_number(VIDEO, b"stts", 8, 0), "has no frames"),
        (with_number(VIDEO, b"stts", 12, 0), "the times of its frames"),
        (with_number(VIDEO, b"stts", 4, 2**31), "changes its frame rate too often"),
        (with_number(VIDEO, b"stts", 4, 9), "stts box is too short"),
        (with_number(VIDEO, b"stsd", 4, 2), "has 2 formats"),
        (with_number(VIDEO, b"stsd", 40, 0x20002000), "8192x8192 pixels; at most"),
        (with_number(VIDEO, b"stsd", 40, 0), "the size of its frames"),
        (VIDEO[:-9], "ends early"),
        (b"\x1aE\xdf\xa3" + bytes(60), "WebM or Matroska; send an MP4 or MOV"),
        (b"", "the video is empty"),
        (VIDEO[:40] + struct.pack(">I4s", 8, b"free") * 20_000, "ends early|too many boxes"),
    ],
)
def test_other_files_are_refused_with_the_reason(data: bytes, words: str) -> None:
    with pytest.raises(InputRejected, match=words) as refused:
        inspect(data, **LIMITS)
    assert refused.value.param == "video"


def test_a_file_of_many_tracks_is_refused() -> None:
    """Each could be the one with the video."""
    tracks = struct.pack(">I4s", 8, b"trak") * 9_000
    data = VIDEO[:32] + struct.pack(">I4s", 8 + len(tracks), b"moov") + tracks
    with pytest.raises(InputRejected, match="9000 tracks"):
        inspect(data, **LIMITS)


def test_a_fragmented_file_is_refused() -> None:
    """As browsers record them: only its parts say how many frames it has."""
    boxes = VIDEO.replace(b"moov", b"MOOV", 1)
    at = boxes.index(b"MOOV") - 4
    (size,) = struct.unpack_from(">I", boxes, at)
    extra = struct.pack(">I4s", 8, b"mvex")
    movie = struct.pack(">I4s", size + 8, b"moov") + boxes[at + 8 : at + size] + extra
    with pytest.raises(InputRejected, match="is fragmented; save it as one piece"):
        inspect(boxes[:at] + movie + boxes[at + size :], **LIMITS)


def test_truncated_files_are_refused() -> None:
    for size in [*range(8, 300, 7), len(VIDEO) // 2, len(VIDEO) * 9 // 10]:
        with pytest.raises(InputRejected):
            inspect(VIDEO[:size], **LIMITS)
