"""Sockets say which test has opened them.

The warning of one that nobody closed comes with the collection of garbage, which is in another test.
"""

from __future__ import annotations

import os
import socket
from typing import Any

_init, _repr = socket.socket.__init__, socket.socket.__repr__
_tests: dict[int, str] = {}  # by id: when a socket is finalized, weak references to it have been cleared


def _noting_init(one: socket.socket, *arguments: Any, **named: Any) -> None:
    _init(one, *arguments, **named)
    _tests[id(one)] = os.environ.get("PYTEST_CURRENT_TEST", "no test")


def _named(one: socket.socket) -> str:
    return f"{_repr(one)} opened in {_tests.get(id(one), 'no test')}"


def install() -> None:
    """Name in the text of a socket, which is that of the warning, the test that opens it."""
    socket.socket.__init__, socket.socket.__repr__ = _noting_init, _named  # type: ignore[method-assign, assignment]
