"""Follows operators' orders: loads, unloads and pins models between forwards."""

from __future__ import annotations

from shared.config.catalog import Catalog
from worker.engine.models.model_cache import ModelCache
from worker.engine.protocol import MemoryOrders

_NEVER = (-1, "")


class OrderFollower:
    """Applies each order once, on the engine's thread. A pin holds until it is missing from the orders.

    An order that needs the memory of a model with running jobs, or frees it, waits for their end.
    """

    def __init__(self, catalog: Catalog, models: ModelCache) -> None:
        self._catalog = catalog
        self._models = models
        self._orders = MemoryOrders()
        self._followed: dict[str, tuple[int, str]] = {}  # the number of the last order, by model
        self._unloading: set[str] = set()
        self._loading: set[str] = set()

    def follow(self, orders: MemoryOrders) -> None:
        """Replace the orders; load what they want, and note what to unload."""
        self._orders = orders
        self._models.pinned = orders.pinned
        self._unloading -= set(orders.pinned)
        for model in orders.pinned:
            self._load(model)
        for order in orders.last:
            if order.number <= self._followed.get(order.model, _NEVER):
                continue
            self._followed[order.model] = order.number
            if order.model in orders.pinned:
                continue
            if order.unload:
                self._unloading.add(order.model)
                self._loading.discard(order.model)
            else:
                self._unloading.discard(order.model)
                self._load(order.model)

    def unload_idle(self, busy: set[str]) -> None:
        """Free the models to unload that no job uses or awaits."""
        for model in self._unloading - busy:
            if not self._models.is_requested(model):
                self._models.unload(model)
                self._unloading.discard(model)

    def load_ended(self, model: str) -> None:
        """Note that a model has been loaded, or could not be."""
        self._loading.discard(model)

    def is_unwanted(self, model: str) -> bool:
        """Return whether the last order for a model is to unload it: only its jobs load it."""
        return model not in self._orders.pinned and any(
            order.model == model and order.unload for order in self._orders.last
        )

    @property
    def awaits_jobs(self) -> bool:
        """Whether an order waits for the end of running jobs; callable from any thread."""
        return bool(self._unloading) or self._models.waiting_for_jobs in self._loading

    def _load(self, model: str) -> None:
        spec = next((one for one in self._catalog if one.id == model), None)
        if spec is not None and self._models.get(model) is None:
            self._loading.add(model)
            self._models.request_load(spec)
