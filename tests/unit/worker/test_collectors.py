"""The GPU as NVML tells of it, and machines that have none."""

from __future__ import annotations

import pytest
import structlog

from worker.metrics.collectors import NvmlGpu


def test_a_machine_without_nvml_tells_nothing_and_goes_on() -> None:
    """A worker on a CPU, or in a container without the driver's library, is scraped all the same."""
    with structlog.testing.capture_logs() as logs:
        card = NvmlGpu.find("00000000-0000-0000-0000-000000000000")
    assert card is None, "no GPU has this name"
    assert {line["event"] for line in logs} & {"nvml_unavailable", "nvml_missing", "nvml_gpu_not_found"}


@pytest.mark.gpu
def test_the_gpu_tells_its_memory() -> None:
    """By the name that torch knows it by."""
    import torch

    from worker.engine.device import uuid_of

    uuid = uuid_of(torch.device("cuda"))
    assert uuid is not None
    card = NvmlGpu.find(uuid)
    assert card is not None
    facts = card.read()
    assert facts is not None
    used, total, share = facts
    assert 0 < used < total
    assert share is None or 0 <= share <= 1
