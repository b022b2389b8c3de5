"""The engine: fuses the forwards of many jobs' unmodified pipelines. Only this package knows diffusers."""

import os

# Before transformers is imported: it tells at every start which of its optional parts are missing.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from worker.engine.engine import Engine
from worker.engine.interface import (
    Activity,
    Finished,
    ForwardFacts,
    InputFiles,
    Listener,
    Made,
    Pixels,
    RunningJob,
    Seat,
    Sound,
    TimeSpent,
)

__all__ = [
    "Activity",
    "Engine",
    "Finished",
    "ForwardFacts",
    "InputFiles",
    "Listener",
    "Made",
    "Pixels",
    "RunningJob",
    "Seat",
    "Sound",
    "TimeSpent",
]
