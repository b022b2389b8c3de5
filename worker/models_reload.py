"""Takes over a changed models file while the worker runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import structlog

from shared.config.catalog import Catalog
from shared.errors import ConfigurationError
from worker.claims.claimed_job import ClaimedJob
from worker.claims.claiming import ClaimLoop
from worker.engine.protocol import EngineInterface
from worker.engine.weights.packages import unused_packages
from worker.model_availability import ModelAvailability

log = structlog.get_logger()

CHECK_S = 0.2


@dataclass(eq=False)
class ModelsReload:
    """Replaces the models of a worker's `catalog` and engine.

    Of models that are removed, or must be loaded anew, no more jobs are claimed, and the change waits for those that
    are claimed: jobs run with the weights of the entry that they were claimed for. The others are claimed meanwhile.
    `on_change` is called after a change, `restart` with the reason why the process must start again for one.
    """

    catalog: Catalog
    engine: EngineInterface
    availability: ModelAvailability
    claim_loop: ClaimLoop
    claimed_jobs: Mapping[str, ClaimedJob]
    on_change: Callable[[], None]
    restart: Callable[[str], None]
    _devices: int = field(init=False)
    _hidden: frozenset[str] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._devices = self.catalog.devices

    async def apply(self, catalog: Catalog) -> None:
        """Replace the models; raises `ConfigurationError` for a file that needs more devices than the worker has."""
        if catalog.devices > self._devices:
            raise ConfigurationError(
                f"a model has devices = {catalog.devices}, and this worker was started for {self._devices}; restart it"
            )
        if packages := await asyncio.to_thread(self._missing_packages, catalog):
            self.restart(f"models of the changed file may need {', '.join(packages)}")
            return
        self.availability.retiring = self.catalog.changed_in(catalog)
        try:
            while not await self._replace(catalog):  # noqa: ASYNC110 - jobs end in many places
                await asyncio.sleep(CHECK_S)
        finally:
            self.availability.retiring = frozenset()
            self.claim_loop.end_pause()

    async def _replace(self, catalog: Catalog) -> bool:
        """Replace the models, unless jobs of retiring ones are claimed; return whether it is done."""
        retiring, before = self.availability.retiring, {spec.id for spec in self.catalog}
        async with self.claim_loop.claiming:  # else a claim in progress could be of an earlier entry
            if any(claimed.job.model in retiring for claimed in self.claimed_jobs.values()):
                return False
            if self.catalog.replace(catalog):
                self.engine.replace_models(catalog, retiring | {spec.id for spec in catalog if spec.id not in before})
                self.on_change()
                log.info("models_reloaded", models=[spec.id for spec in catalog], reloaded=sorted(retiring))
        return True

    def _missing_packages(self, catalog: Catalog) -> list[str]:
        """Return the packages that these models may need, and that the engine's process was started without."""
        if self._hidden is None:
            self._hidden = frozenset(unused_packages(self.catalog))
        return sorted(self._hidden.difference(unused_packages(catalog)))
