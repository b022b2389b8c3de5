"""The denoisers of the video families."""

from __future__ import annotations

from worker.engine.architectures.rules import Architectures

VIDEOS: Architectures = {}
