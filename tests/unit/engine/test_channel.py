"""Messages between a worker and its engine's process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shared.errors import InferenceFailed
from worker.engine.channel import Channel, SharedArray, shared_array
from worker.engine.outputs import Output
from worker.engine.protocol import JobFinished


@pytest.fixture
def channels() -> Iterator[tuple[Channel, Channel]]:
    left, right = socket.socketpair()
    pair = Channel(left), Channel(right)
    yield pair
    for channel in pair:
        channel.close()


def transfer(channels: tuple[Channel, Channel], *messages: Any) -> list[Any]:
    """Send messages from a thread, as they can exceed the socket's buffer, and return what is received."""

    def send() -> None:
        for message in messages:
            channels[0].send(message)

    sending = threading.Thread(target=send)
    sending.start()
    received = [channels[1].receive() for _ in messages]
    sending.join()
    return received


def test_messages_arrive_unchanged_and_in_order(channels: tuple[Channel, Channel]) -> None:
    image = np.arange(3 * 700 * 700, dtype=np.uint8).reshape(700, 700, 3)
    error = InferenceFailed("no such image", param="images")
    words, output, finished = transfer(
        channels, ("warm_up",), Output(image, flagged=True), JobFinished("job:1", error=error, load_ms=3)
    )
    assert words == ("warm_up",)
    assert output.flagged
    np.testing.assert_array_equal(output.pixels, image)
    assert (str(finished.error), finished.error.param, finished.load_ms) == ("no such image", "images", 3)


def test_frames_are_not_copied(channels: tuple[Channel, Channel]) -> None:
    """Both ends use the same memory: what one writes after sending, the other reads."""
    frames, more = shared_array((4, 8, 8, 3), np.uint8), shared_array((2, 2), np.float32)
    frames[:] = 7
    ((received, [output]),) = transfer(channels, (more, [Output(frames)]))
    assert isinstance(output.pixels, SharedArray)
    assert (output.pixels.shape, output.pixels.dtype, int(output.pixels.sum())) == (
        (4, 8, 8, 3),
        np.uint8,
        7 * 4 * 8 * 8 * 3,
    )
    frames[3] = 9
    more[1, 1] = 0.5
    assert output.pixels[3].min() == 9
    assert received[1, 1] == 0.5


def test_a_view_of_shared_frames_is_copied(channels: tuple[Channel, Channel]) -> None:
    frames = shared_array((4, 8, 8, 3), np.uint8)
    frames[2] = 5
    (part,) = transfer(channels, frames[2:3])
    frames[2] = 6
    assert type(part) is np.ndarray
    assert (part.shape, part.min()) == ((1, 8, 8, 3), 5)


def test_a_closed_end_raises_at_the_other() -> None:
    left, right = socket.socketpair()
    channels = Channel(left), Channel(right)
    left.sendall(b"\0\0\0")  # cut off in the middle of a message
    channels[0].close()
    with pytest.raises(EOFError):
        channels[1].receive()
    with pytest.raises(OSError, match="Broken pipe"):
        channels[1].send("unread")
    channels[1].close()
