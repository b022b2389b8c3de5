"""The engine: fuses the forwards of many jobs' unmodified pipelines. Only this package imports diffusers.

This module exports the types of the boundary, without torch; the engine is `engine.Engine`.
"""

import os

# Before transformers is imported: it prints a warning for each optional dependency that is missing.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from worker.engine.protocol import (
    Activity,
    Audio,
    EngineEvent,
    EngineEvents,
    EngineFactory,
    EngineInterface,
    EngineRequest,
    EngineStatus,
    ForwardDone,
    ForwardRetried,
    InputFiles,
    JobDecoding,
    JobEvent,
    JobFinished,
    JobLoading,
    JobProgress,
    MemoryExhausted,
    ModelEvent,
    ModelLoaded,
    ModelLoadFailed,
    Output,
    OutputReady,
    Pixels,
    PreviewReady,
    ThreadTime,
    allowed_rows,
)

__all__ = [
    "Activity",
    "Audio",
    "EngineEvent",
    "EngineEvents",
    "EngineFactory",
    "EngineInterface",
    "EngineRequest",
    "EngineStatus",
    "ForwardDone",
    "ForwardRetried",
    "InputFiles",
    "JobDecoding",
    "JobEvent",
    "JobFinished",
    "JobLoading",
    "JobProgress",
    "MemoryExhausted",
    "ModelEvent",
    "ModelLoadFailed",
    "ModelLoaded",
    "Output",
    "OutputReady",
    "Pixels",
    "PreviewReady",
    "ThreadTime",
    "allowed_rows",
]
