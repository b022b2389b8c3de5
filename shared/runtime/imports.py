"""How a process imports its libraries: without optional packages that it does not use, and without collections."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

UNUSED = ("opentelemetry.sdk", "rich")
"""redis imports the SDK of OpenTelemetry, and structlog imports rich, wherever they are installed: 6 MB and 150
modules. Traces import the SDK when they are configured."""


@contextmanager
def importing(without: tuple[str, ...] = UNUSED) -> Iterator[None]:
    """Hide packages from the libraries that the block imports, and do not collect garbage meanwhile.

    From here on SIGTERM ends the process, until it sets a handler of its own.

    What is imported stays, so collections find little and grow with each: they took a quarter of the engine's imports.
    """
    _end_at_sigterm()
    collected = gc.isenabled()
    absent = [name for name in without if name not in sys.modules]
    gc.disable()
    hide(*absent)
    try:
        yield
    finally:
        for name in absent:
            sys.modules.pop(name, None)
        if collected:
            gc.enable()


def _end_at_sigterm() -> None:
    """Set a handler in the first process of a container, to which the kernel sends no signal that has none."""
    if os.getpid() == 1 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, _frame: os._exit(128 + number))


def hide(*packages: str) -> None:
    """Make packages that are not imported yet look as if they were not installed."""
    for name in packages:
        # With None, `import` raises ModuleNotFoundError and `find_spec` returns None, as the language defines.
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
