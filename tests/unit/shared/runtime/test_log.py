"""Lines of the log: JSON, or text on a terminal."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator

import pytest
import structlog

from shared.runtime import log

ANSI = re.compile(r"\x1b\[\d*m")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def unchanged_logging() -> Iterator[None]:
    root, config = logging.getLogger(), structlog.get_config()
    handlers, level = list(root.handlers), root.level
    yield
    structlog.configure(**config)
    root.handlers[:] = handlers
    root.setLevel(level)


def write_lines(stream: io.StringIO) -> list[str]:
    """Log an event of ours and a message of a library; return the lines."""
    log.configure("INFO", stream=stream)
    structlog.get_logger("worker.worker").info("drain_started", running=3)
    logging.getLogger("library").warning("it is %s", "late")
    return stream.getvalue().splitlines()


def test_a_line_is_json_off_a_terminal() -> None:
    ours, of_library = map(json.loads, write_lines(io.StringIO()))
    assert {"event": "drain_started", "running": 3, "level": "info", "logger": "worker.worker"}.items() <= ours.items()
    assert {"event": "it is late", "level": "warning", "logger": "library"}.items() <= of_library.items()
    assert "at" in ours.keys() & of_library.keys()


def test_a_line_on_a_terminal_begins_with_its_time() -> None:
    ours, of_library = (ANSI.sub("", line) for line in write_lines(Terminal()))
    time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z"
    assert re.fullmatch(rf"{time} \[info +\] drain_started +\[worker\.worker\] running=3", ours)
    assert re.fullmatch(rf"{time} \[warning +\] it is late +\[library\]", of_library)
