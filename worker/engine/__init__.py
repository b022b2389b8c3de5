"""The engine: fuses the forwards of many jobs' unmodified pipelines. Only this package knows diffusers.

What can be imported from here is what the rest of the worker exchanges with it, without torch; the engine itself is
`engine.Engine`.
"""

import os

# Before transformers is imported: it tells at every start which of its optional parts are missing.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from worker.engine.protocol import (
    Activity,
    AnyEngine,
    EngineFactory,
    Finished,
    ForwardFacts,
    Incident,
    InputFiles,
    Listener,
    Made,
    Pixels,
    Seat,
    Sound,
    Standing,
    TimeSpent,
    allowed,
)

__all__ = [
    "Activity",
    "AnyEngine",
    "EngineFactory",
    "Finished",
    "ForwardFacts",
    "Incident",
    "InputFiles",
    "Listener",
    "Made",
    "Pixels",
    "Seat",
    "Sound",
    "Standing",
    "TimeSpent",
    "allowed",
]
