"""A job as the service returns it, for tests of its clients."""

from __future__ import annotations

from typing import Any

JOB: dict[str, Any] = {
    "id": "job_1",
    "status": "succeeded",
    "model": "demo",
    "prompt": "x",
    "seed": 1,
    "n": 1,
    "width": 64,
    "height": 64,
    "steps": 4,
    "guidance_scale": 2.0,
    "created_at": "2026-01-31T12:00:00.000Z",
}
