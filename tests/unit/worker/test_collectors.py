"""GPU metrics from NVML, also on machines without it."""

from __future__ import annotations

import pytest
import structlog

from worker.metrics.collectors import NvmlGpu


def test_machine_without_nvml_has_no_gpu_metrics() -> None:
    """A worker on a CPU, or in a container without the driver's library, can still be scraped."""
    with structlog.testing.capture_logs() as logs:
        gpu = NvmlGpu.find("00000000-0000-0000-0000-000000000000")
    assert gpu is None, "no GPU has this name"
    assert {line["event"] for line in logs} & {"nvml_unavailable", "nvml_missing", "nvml_gpu_not_found"}


@pytest.mark.gpu
def test_gpu_reports_its_memory() -> None:
    """It is found by the UUID that torch reports."""
    import torch

    from worker.engine.device import device_uuid

    uuid = device_uuid(torch.device("cuda"))
    assert uuid is not None
    gpu = NvmlGpu.find(uuid)
    assert gpu is not None
    usage = gpu.read()
    assert usage is not None
    assert 0 < usage.used_bytes < usage.total_bytes
    assert usage.utilisation is None or 0 <= usage.utilisation <= 1
