"""Messages between the processes of a worker; the frames of videos go along without being copied."""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import pickle
import socket
import struct
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

HEAD = struct.Struct("!Q")  # the length of what follows
MOST_MEMORIES = 253  # with one message, of Linux


class SharedMemory:
    """Memory that processes can share, as a file without a name; closed when nobody holds it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)

    @staticmethod
    def of(nbytes: int) -> SharedMemory:
        """Return new memory, which the system hands out as it is written to."""
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("fusequeue")
        else:
            descriptor, path = tempfile.mkstemp()
            os.unlink(path)
        memory = SharedMemory(descriptor)
        os.truncate(descriptor, nbytes)
        return memory


class SharedArray(np.ndarray[Any, np.dtype[Any]]):
    """An array that lies in `memory`; that is None for a view of such an array."""

    memory: SharedMemory | None = None


def shared_array(shape: Sequence[int], dtype: npt.DTypeLike) -> SharedArray:
    """Return an array of zeros that a channel passes on as it is."""
    return _array(SharedMemory.of(max(1, int(np.prod(shape)) * np.dtype(dtype).itemsize)), shape, dtype)


def _array(memory: SharedMemory, shape: Sequence[int], dtype: npt.DTypeLike) -> SharedArray:
    array = SharedArray(tuple(shape), dtype, buffer=mmap.mmap(memory.descriptor, 0))
    array.memory = memory
    return array


class _Pickler(pickle.Pickler):
    def __init__(self, out: io.BytesIO) -> None:
        super().__init__(out, protocol=5)
        self.memories: list[SharedMemory] = []

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, SharedArray):
            return NotImplemented
        if value.memory is None:
            return value.view(np.ndarray).__reduce_ex__(5)
        self.memories.append(value.memory)
        return _Sent, (len(self.memories) - 1, value.shape, value.dtype.str)


class _Sent:
    """In a message, what to make an array with that came beside it."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: io.BytesIO, memories: Sequence[SharedMemory]) -> None:
        super().__init__(data)
        self._memories = memories

    def find_class(self, module: str, name: str) -> Any:
        if name == _Sent.__name__ and module == __name__:
            return self._array
        return super().find_class(module, name)

    def _array(self, at: int, shape: Sequence[int], dtype: str) -> SharedArray:
        return _array(self._memories[at], shape, dtype)


class Channel:
    """One end of a connected pair of sockets. One thread may send while another receives.

    Both ends are the worker's own: a message is whatever can be pickled.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def send(self, message: Any) -> None:
        """Send a message; raises `OSError` when the other end is closed."""
        body = io.BytesIO()
        pickler = _Pickler(body)
        pickler.dump(message)
        parts = [memoryview(HEAD.pack(body.tell())), body.getbuffer()]
        # At once where it fits into the socket's buffer: a thread that comes back from the system waits for Python.
        if pickler.memories:
            sent = socket.send_fds(self._end, parts, [memory.descriptor for memory in pickler.memories])
        else:
            sent = self._end.sendmsg(parts)
        for part in parts:
            if sent < len(part):
                self._end.sendall(part[sent:])
            sent = max(0, sent - len(part))

    def receive(self) -> Any:
        """Wait for the next message; raises `EOFError` when the other end is closed, `OSError` when this one is."""
        head, descriptors, _, _ = socket.recv_fds(self._end, HEAD.size, MOST_MEMORIES)
        memories = [SharedMemory(descriptor) for descriptor in descriptors]
        (length,) = HEAD.unpack(head + self._exactly(HEAD.size - len(head)))
        return _Unpickler(io.BytesIO(self._exactly(length)), memories).load()

    def _exactly(self, length: int) -> bytearray:
        data = bytearray(length)
        left = memoryview(data)
        while left:
            read = self._end.recv_into(left)
            if not read:
                raise EOFError
            left = left[read:]
        return data

    def close(self) -> None:
        """Close this end: whoever waits at either end is told."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()
