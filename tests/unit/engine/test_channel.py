"""Messages between a worker and its engine's process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shared.errors import InferenceFailed
from worker.engine import JobFinished, Output
from worker.engine.channel import Channel, SharedArray, shared_array


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    one, other = socket.socketpair()
    channels = Channel(one), Channel(other)
    yield channels
    for channel in channels:
        channel.close()


def sent(ends: tuple[Channel, Channel], *messages: Any) -> list[Any]:
    """Send messages from a thread, as they may be larger than what the system holds, and return what comes."""

    def send() -> None:
        for message in messages:
            ends[0].send(message)

    sending = threading.Thread(target=send)
    sending.start()
    received = [ends[1].receive() for _ in messages]
    sending.join()
    return received


def test_messages_come_as_they_were_sent_and_in_order(ends: tuple[Channel, Channel]) -> None:
    picture = np.arange(3 * 700 * 700, dtype=np.uint8).reshape(700, 700, 3)
    error = InferenceFailed("no such picture", param="images")
    words, made, finished = sent(
        ends, ("warm_up",), Output(picture, flagged=True), JobFinished("job:1", error=error, load_ms=3)
    )
    assert words == ("warm_up",)
    assert made.flagged
    np.testing.assert_array_equal(made.pixels, picture)
    assert (str(finished.error), finished.error.param, finished.load_ms) == ("no such picture", "images", 3)


def test_frames_are_not_copied(ends: tuple[Channel, Channel]) -> None:
    """What one end writes after the sending, the other reads: it is the same memory."""
    frames, more = shared_array((4, 8, 8, 3), np.uint8), shared_array((2, 2), np.float32)
    frames[:] = 7
    ((received, [made]),) = sent(ends, (more, [Output(frames)]))
    assert isinstance(made.pixels, SharedArray)
    assert (made.pixels.shape, made.pixels.dtype, int(made.pixels.sum())) == ((4, 8, 8, 3), np.uint8, 7 * 4 * 8 * 8 * 3)
    frames[3] = 9
    more[1, 1] = 0.5
    assert made.pixels[3].min() == 9
    assert received[1, 1] == 0.5


def test_a_part_of_shared_frames_is_copied(ends: tuple[Channel, Channel]) -> None:
    frames = shared_array((4, 8, 8, 3), np.uint8)
    frames[2] = 5
    (part,) = sent(ends, frames[2:3])
    frames[2] = 6
    assert type(part) is np.ndarray
    assert (part.shape, part.min()) == ((1, 8, 8, 3), 5)


def test_an_end_that_is_closed_is_told() -> None:
    one, other = socket.socketpair()
    ends = Channel(one), Channel(other)
    one.sendall(b"\0\0\0")  # cut off in the middle of a message
    ends[0].close()
    with pytest.raises(EOFError):
        ends[1].receive()
    with pytest.raises(OSError, match="Broken pipe"):
        ends[1].send("to nobody")
    ends[1].close()
