"""What `fusequeue workers` shows of a worker."""

from __future__ import annotations

from typing import Any

import pytest

from cli.jobs import WORKER_COLUMNS, worker_row
from fusequeue import WorkerInfo


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        (
            {"slots": 16, "free_slots": 13, "models_bytes": 3 * 2**29, "forwards": 4, "forward_rows": 10},
            {"slots in use": "3 of 16", "memory": "1.5 GiB", "rows per forward": "2.5"},
        ),
        ({"models_bytes": 7_516_268}, {"memory": "7.2 MiB"}),
        ({"slots": 8, "free_slots": 8}, {"slots in use": "0 of 8", "memory": "0.0 KiB", "rows per forward": ""}),
        (
            {"models": ("a", "b", "c"), "loaded": ("a",), "loading": ("b",)},
            {"models": ["a", "b (loading)", "c (not loaded)"]},
        ),
        ({"state": "draining", "device": "NVIDIA H100"}, {"state": "draining", "device": "NVIDIA H100"}),
    ],
)
def test_a_worker_is_one_row(fields: dict[str, Any], shown: dict[str, object]) -> None:
    worker = WorkerInfo(**{"id": "worker_1", "models": (), "state": "ready", **fields})
    row = dict(zip(WORKER_COLUMNS, worker_row(worker), strict=True))
    assert row["id"] == "worker_1"
    assert {name: row[name] for name in shown} == shown
