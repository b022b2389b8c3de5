"""The engine: fuses the forwards of many jobs' unmodified pipelines. Only this package knows diffusers.

What can be imported from here is what the rest of the worker exchanges with it, without torch; the engine itself is
`engine.Engine`.
"""

import os

# Before transformers is imported: it tells at every start which of its optional parts are missing.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from worker.engine.protocol import (
    Activity,
    Audio,
    EngineEvents,
    EngineFactory,
    EngineIncident,
    EngineInterface,
    EngineRequest,
    EngineStatus,
    ForwardDone,
    InputFiles,
    JobFinished,
    Output,
    Pixels,
    ThreadTime,
    allowed_rows,
)

__all__ = [
    "Activity",
    "Audio",
    "EngineEvents",
    "EngineFactory",
    "EngineIncident",
    "EngineInterface",
    "EngineRequest",
    "EngineStatus",
    "ForwardDone",
    "InputFiles",
    "JobFinished",
    "Output",
    "Pixels",
    "ThreadTime",
    "allowed_rows",
]
