"""The GPU as its driver's management library (NVML) sees it; where there is none, nothing is told."""

from __future__ import annotations

from typing import Any

import structlog

log = structlog.get_logger()


class Card:
    """One GPU, or one slice (MIG) of it."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle

    @classmethod
    def find(cls, uuid: str) -> Card | None:
        """Return the card of this UUID (hexadecimal digits alone), None where NVML or the card cannot be had."""
        try:
            import pynvml
        except ImportError:
            log.info("nvml_missing", remedy="pip install nvidia-ml-py, for metrics of the GPU's memory and utilisation")
            return None
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            log.info("nvml_unavailable", reason=str(error))
            return None
        for kind in ("GPU", "MIG"):
            try:
                return cls(pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"{kind}-{uuid}"))
            except pynvml.NVMLError as error:
                log.debug("nvml_card_not_found", kind=kind, reason=str(error))
        return None

    def read(self) -> tuple[int, int, float | None] | None:
        """Return memory in use and in all, in bytes, and the share of the last moments in which a kernel ran.

        The share is None where the card does not tell it (a slice of one); None altogether where it tells nothing now.
        """
        try:
            memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        except self._nvml.NVMLError as error:
            log.debug("nvml_silent", reason=str(error))
            return None
        try:
            share = self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100
        except self._nvml.NVMLError:
            share = None
        return int(memory.used), int(memory.total), share
