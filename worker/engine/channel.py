"""Messages between the worker's processes; shared memory is passed as file descriptors, without a copy."""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import pickle
import select
import socket
import struct
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

HEADER = struct.Struct("!Q")  # length of the body
MAX_DESCRIPTORS = 253  # per message on Linux


class SharedMemory:
    """Memory that processes can share: an anonymous file, closed with the last reference."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)

    @staticmethod
    def allocate(nbytes: int) -> SharedMemory:
        """Return new memory, which the system backs when it is written to."""
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("fusequeue")
        else:
            descriptor, path = tempfile.mkstemp()
            os.unlink(path)
        memory = SharedMemory(descriptor)
        os.truncate(descriptor, nbytes)
        return memory


class SharedArray(np.ndarray[Any, np.dtype[Any]]):
    """Array in shared memory. `memory` is None for a view of such an array."""

    memory: SharedMemory | None = None


def shared_array(shape: Sequence[int], dtype: npt.DTypeLike) -> SharedArray:
    """Return an array of zeros that a channel sends without a copy."""
    return _array(SharedMemory.allocate(max(1, int(np.prod(shape)) * np.dtype(dtype).itemsize)), shape, dtype)


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
        return _SharedArrayMarker, (len(self.memories) - 1, value.shape, value.dtype.str)


class _SharedArrayMarker:
    """Stands in the pickle for an array whose memory is sent as a descriptor."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: io.BytesIO, memories: Sequence[SharedMemory]) -> None:
        super().__init__(data)
        self._memories = memories

    def find_class(self, module: str, name: str) -> Any:
        if name == _SharedArrayMarker.__name__ and module == __name__:
            return lambda at, shape, dtype: _array(self._memories[at], shape, dtype)
        return super().find_class(module, name)


class Channel:
    """One end of a socket pair. One thread can send while another receives.

    Both ends are trusted, so messages are pickles.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def send(self, message: Any) -> None:
        """Send a message; raises `OSError` if the other end is closed."""
        body = io.BytesIO()
        pickler = _Pickler(body)
        pickler.dump(message)
        parts = [memoryview(HEADER.pack(body.getbuffer().nbytes)), body.getbuffer()]
        # One system call where the socket's buffer holds the message: after each, the thread waits for Python's lock.
        if pickler.memories:
            sent = socket.send_fds(self._socket, parts, [memory.descriptor for memory in pickler.memories])
        else:
            sent = self._socket.sendmsg(parts)
        for part in parts:
            if sent < len(part):
                self._socket.sendall(part[sent:])
            sent = max(0, sent - len(part))

    def receive(self) -> Any:
        """Wait for the next message; raises `EOFError` if the other end is closed, `OSError` if this one is."""
        header, descriptors, _, _ = socket.recv_fds(self._socket, HEADER.size, MAX_DESCRIPTORS)
        memories = [SharedMemory(descriptor) for descriptor in descriptors]
        (length,) = HEADER.unpack(header + self._exactly(HEADER.size - len(header)))
        return _Unpickler(io.BytesIO(self._exactly(length)), memories).load()

    def has_message(self, timeout_s: float) -> bool:
        """Wait until a message, or the end of the connection, can be received; False on timeout."""
        return bool(select.select([self._socket], [], [], timeout_s)[0])

    def _exactly(self, length: int) -> bytearray:
        data = bytearray(length)
        left = memoryview(data)
        while left:
            read = self._socket.recv_into(left)
            if not read:
                raise EOFError
            left = left[read:]
        return data

    def close(self) -> None:
        """Close this end; waiting calls at both ends raise."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
