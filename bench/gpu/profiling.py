"""Counts what the host queues on the device and waits for, and how long the device is busy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from bench.gpu.stage import DRY, Figures, synchronize


def profiled(run: Callable[[], None], figures: Figures) -> None:
    """Add what the host queued and waited for, and how long the device was busy, from its first kernel to its last."""
    activities = [ProfilerActivity.CPU if DRY else ProfilerActivity.CUDA]  # with both, the host would be slower
    all_threads = _ExperimentalConfig(profile_all_threads=True)  # the engine has its own
    with profile(activities=activities, experimental_config=all_threads) as made:
        run()
        synchronize()
    calls: Counter[str] = Counter()
    spans: list[tuple[int, int]] = []
    for event in made.profiler.kineto_results.events():
        on_device = str(event.device_type()).endswith("CUDA")
        if on_device or (DRY and event.name().startswith("aten::")):
            spans.append((event.start_ns(), event.start_ns() + event.duration_ns()))
        elif event.name().startswith(("cuda", "cu")):
            calls[event.name()] += 1
    figures["kernels"] = len(spans)
    figures["launches"] = sum(count for name, count in calls.items() if "Launch" in name)
    figures["waits"] = {name: count for name, count in calls.items() if "Synchronize" in name}
    figures["copies"] = sum(count for name, count in calls.items() if "Memcpy" in name)
    if spans:
        whole = max(end for _, end in spans) - min(start for start, _ in spans)
        figures["busy_share"] = round(_union(spans) / whole, 4)


def _union(spans: list[tuple[int, int]]) -> int:
    busy, until = 0, 0
    for start, end in sorted(spans):
        busy += max(0, end - max(start, until))
        until = max(until, end)
    return busy
