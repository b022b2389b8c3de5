"""`python -m worker.engine.process DESCRIPTOR`: an engine for the worker at the other end of that socket.

The worker sends the catalog and the settings, and from then on the names of the engine's methods with their arguments.
It hears back what a `Listener` does, and ever again how the engine stands.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

import structlog

from shared.config.models_file import Catalog
from shared.config.settings import Settings
from shared.errors import ConfigurationError, FusequeueError
from shared.runtime import log
from worker.engine.channel import Channel
from worker.engine.device import device_facts
from worker.engine.engine import Engine
from worker.engine.protocol import EngineIncident, EngineStatus, ForwardDone, JobFinished, Output, Pixels

SWITCH_INTERVAL_S = 0.0005
"""How long one thread may keep Python from another. The engine's thread gives it up at every operation of torch, and
would wait for up to Python's 5 ms to have it back, many times a forward."""

STANDING_S = 0.1
MOST_AT_ONCE = 64  # callbacks in one message
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

Told: TypeAlias = tuple[str, tuple[Any, ...]]
"""A callback of the listener, by name, with its arguments."""


class EventSender:
    """The engine's `Listener`: a thread of its own sends what it hears, in order, as many at once as there are.

    Waking that thread takes Python from the engine's one. What is mostly followed by more at once does not: a forward
    and a decoding by progress, a picture by its job's end. It is sent within `STANDING_S` in any case.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._told: deque[Told] = deque()
        self._due = threading.Event()
        self._finishing = False
        self._thread = threading.Thread(target=self._send, name="tell", daemon=True)
        self._standing_at = float("-inf")
        self._engine: Engine | None = None

    def start(self, engine: Engine) -> None:
        """Begin to send."""
        self._engine = engine
        self._thread.start()

    def finish(self) -> None:
        """Send what there is, and end."""
        self._finishing = True
        self._due.set()
        self._thread.join()

    def loading(self, key: str) -> None:
        self._tell("loading", key)

    def progress(self, key: str, step: int, total: int) -> None:
        self._tell("progress", key, step, total)

    def decoding(self, key: str) -> None:
        self._told.append(("decoding", (key,)))

    def preview(self, key: str, index: int, pixels: Pixels) -> None:
        self._tell("preview", key, index, pixels)

    def picture(self, key: str, index: int, made: Output) -> None:
        self._told.append(("picture", (key, index, made)))

    def finished(self, key: str, finished: JobFinished) -> None:
        self._tell("finished", key, finished)

    def forward(self, facts: ForwardDone) -> None:
        self._told.append(("forward", (facts,)))

    def incident(self, incident: EngineIncident) -> None:
        self._tell("incident", incident)

    def _tell(self, name: str, *arguments: Any) -> None:
        self._told.append((name, arguments))
        self._due.set()

    def warm(self) -> None:
        """Tell that the models have come."""
        self._standing_at = float("-inf")  # they stand there by now
        self._tell("warm")

    def _send(self) -> None:
        try:
            while not self._finishing or self._told:
                self._due.wait(STANDING_S)
                self._due.clear()
                while True:
                    told = [self._told.popleft() for _ in range(min(MOST_AT_ONCE, len(self._told)))]
                    self._channel.send((told, self._standing()))
                    if not self._told:
                        break
        except Exception as error:  # a silent engine would be worse than none; the worker may be gone
            if not isinstance(error, OSError):
                structlog.get_logger().exception("engine_cannot_tell")
            os._exit(1)

    def _standing(self) -> EngineStatus | None:
        now = time.monotonic()
        if self._engine is None or now - self._standing_at < STANDING_S:
            return None
        self._standing_at = now
        return self._engine.status()


def main(descriptor: int) -> int:
    """Serve until the worker says stop, or is gone."""
    _share_the_workers_fate()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    channel = Channel(socket.socket(fileno=descriptor))
    catalog: Catalog
    settings: Settings
    catalog, settings = channel.receive()
    log.configure(settings.log_level)
    teller = EventSender(channel)
    try:
        device_facts(settings.device)
        engine = Engine(catalog, teller, settings)
    except (FusequeueError, ValueError) as error:
        channel.send(error if isinstance(error, FusequeueError) else ConfigurationError(f"FUSEQUEUE_DEVICE: {error}"))
        return 1
    engine.start()
    teller.start(engine)
    try:
        while _obey(engine, teller, *channel.receive()):
            pass
    except (EOFError, OSError):
        os._exit(1)  # nobody is there to work for, and the engine's thread may be anywhere
    teller.finish()
    return 0


def _obey(engine: Engine, teller: EventSender, name: str, *arguments: Any) -> bool:
    """Do what the worker asks; False once that was to stop."""
    match name:
        case "warm_up":
            threading.Thread(target=_warm_up, args=(engine, teller), name="warm-up", daemon=True).start()
        case "stop":
            engine.stop(*arguments)
            return False
        case "submit" | "cancel" | "release_all":
            method: Callable[..., None] = getattr(engine, name)
            method(*arguments)
        case _:
            structlog.get_logger().error("engine_asked_for_the_unknown", name=name)
    return True


def _warm_up(engine: Engine, teller: EventSender) -> None:
    engine.warm_up()
    # What is here now, mostly libraries and models, stays: a full collection would walk through all of it, for 0.3 s in
    # which no forward starts.
    gc.freeze()
    teller.warm()


def _share_the_workers_fate() -> None:
    """Leave it to the worker what a signal to both means, and end when it is gone, be this process hung."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
