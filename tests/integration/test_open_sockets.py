"""A socket that a test leaves open fails another test, whose message names the first."""

from __future__ import annotations

import gc
import socket
import warnings


def test_the_warning_of_a_socket_left_open_names_the_test_that_opened_it() -> None:
    """Also in a cycle, which garbage collection finds later."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cycle: list[object] = [socket.create_server(("127.0.0.1", 0))]
        cycle.append(cycle)
        del cycle
        gc.collect()
    (warning,) = [str(one.message) for one in caught if "unclosed" in str(one.message)]
    assert "opened in tests/integration/test_open_sockets.py::test_the_warning_of_a_socket" in warning
