"""`python -m worker.engine.process DESCRIPTOR [PACKAGE...]`: an engine for the worker at the other end of that socket.

The process imports torch and diffusers at once, without the packages that the worker names. The worker sends the
catalog and the settings, then the names of engine methods with their arguments. It receives the engine's events and,
ten times a second, its status.
"""

import gc
import os
import signal
import socket
import sys
import threading
import time
from collections import deque

from shared.runtime.imports import hide, importing

if __name__ == "__main__":
    hide(*sys.argv[2:])
with importing():
    import structlog

    from shared.errors import ConfigurationError, FusequeueError
    from shared.runtime import log
    from shared.runtime.parent_process import end_with_parent
    from worker.engine.channel import Channel
    from worker.engine.device import DEVICE_REMEDY, device_facts
    from worker.engine.engine import Engine
    from worker.engine.protocol import (
        EngineEvent,
        ForwardDone,
        JobPhaseChanged,
        ModelLoadFailed,
        OutputReady,
        WarmUpDone,
    )

SWITCH_INTERVAL_S = 0.0005
"""How long a thread can hold Python's lock. The engine's thread releases it in every torch operation, and with
Python's default of 5 ms would wait that long to get it back, many times per forward."""

STATUS_INTERVAL_S = 0.1
MAX_EVENTS_PER_MESSAGE = 64

DEFERRED = (JobPhaseChanged, OutputReady, ForwardDone)  # another event usually follows at once


class EventSender:
    """The engine's `EngineEvents`: a thread sends the events in order, several per message.

    Waking that thread takes Python's lock from the engine's thread, so `DEFERRED` events do not wake it; they are sent
    within `STATUS_INTERVAL_S`.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._events: deque[EngineEvent | WarmUpDone] = deque()
        self._wake = threading.Event()
        self._finishing = False
        self._status_sent_at_s = float("-inf")

    def start(self, engine: Engine) -> None:
        self._thread = threading.Thread(target=self._send, args=(engine,), name="event-sender", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Send the remaining events and stop."""
        self._finishing = True
        self._wake.set()
        self._thread.join()

    def on_event(self, event: EngineEvent) -> None:
        self._events.append(event)
        if not isinstance(event, DEFERRED):
            self._wake.set()

    def warm_up_done(self) -> None:
        """Send `WarmUpDone` together with a status that lists the loaded models."""
        self._status_sent_at_s = float("-inf")
        self._events.append(WarmUpDone())
        self._wake.set()

    def _send(self, engine: Engine) -> None:
        try:
            while not self._finishing or self._events:
                self._wake.wait(STATUS_INTERVAL_S)
                self._wake.clear()
                count = min(MAX_EVENTS_PER_MESSAGE, len(self._events))
                events = [self._events.popleft() for _ in range(count)]
                # A worker that releases a failed model's jobs must not claim them again for want of the status.
                status_due = time.monotonic() - self._status_sent_at_s >= STATUS_INTERVAL_S or any(
                    isinstance(event, ModelLoadFailed) for event in events
                )
                if status_due:
                    self._status_sent_at_s = time.monotonic()
                self._channel.send((events, engine.status() if status_due else None))
                if self._events:
                    self._wake.set()
        except Exception as error:  # exit, because an engine that sends nothing would go unnoticed
            if not isinstance(error, OSError):
                structlog.get_logger().exception("event_sender_failed")
            os._exit(1)


def main(descriptor: int) -> int:
    """Run until the worker sends `stop` or its process ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the worker handles them
    end_with_parent(os.getppid())  # with the worker, even if this process hangs
    gc.freeze()  # what is imported, so that collections while models load do not walk through it
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    channel = Channel(socket.socket(fileno=descriptor))
    try:
        catalog, settings = channel.receive()
    except (EOFError, OSError):
        return 1  # the worker ended during its own start
    log.configure(settings.log_level)
    sender = EventSender(channel)
    try:
        facts = device_facts(settings.device)
        engine = Engine(catalog, sender, settings)
    except FusequeueError as error:
        channel.send(error)
        return 1
    except ValueError as error:
        channel.send(ConfigurationError(f"FUSEQUEUE_DEVICE: {error}; {DEVICE_REMEDY}"))
        return 1
    if settings.device is None and facts.kind == "cpu":
        remedy = "set FUSEQUEUE_DEVICE to cuda, and a worker without a GPU does not start, or to cpu"
        structlog.get_logger().warning("no_gpu", device="cpu", remedy=remedy)
    engine.start()
    sender.start(engine)
    command = ""
    while command != "stop":
        try:
            command, *arguments = channel.receive()
        except (EOFError, OSError):
            os._exit(1)  # the worker is gone, and the engine's thread may hang
        if command == "warm_up":
            threading.Thread(target=_warm_up, args=(engine, sender), name="warm-up", daemon=True).start()
        else:
            getattr(engine, command)(*arguments)
    sender.finish()
    return 0


def _warm_up(engine: Engine, sender: EventSender) -> None:
    engine.warm_up()
    # Libraries and models stay for the life of the process: a full collection would walk through them for 0.3 s, in
    # which no forward starts.
    gc.freeze()
    sender.warm_up_done()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
