"""The engine without a server: `from fusequeue import Engine`. No Redis, no HTTP, no object storage.

An application that has a GPU of its own makes images and videos with the same fields, models and fused forwards as the
jobs of the service; `worker.engine` does the work of both.
"""

from library.engine import AsyncEngine, Engine
from library.results import GenerationFailed, Result, Shape, Sound, Video

__all__ = ["AsyncEngine", "Engine", "GenerationFailed", "Result", "Shape", "Sound", "Video"]
