"""Which signature a worker claims next.

Priorities order the jobs of one tenant. Between tenants, interactive jobs go first only while their tenant is ahead:
its GPU usage is at most an allowance above that of the least-served tenant that they delay. Beyond it they go with the
standard jobs of others, by usage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from shared.queue.order import deadlines, model_loads
from shared.queue.order.facts import READY_READ, TENANTS_READ, OrderFacts, QueueFacts, SignatureFacts, TenantFacts

BULK_RANK = 2
SIGNATURES_COMPARED = 4
"""Signatures of a model and priority after which no further tenant is looked at."""

USAGE_HALF_LIFE_MS = 300_000


class Part(NamedTuple):
    """Jobs of a rank: of all tenants (`ahead` is None), of those that are ahead, or of the others."""

    rank: int
    ahead: bool | None = None


class Step(NamedTuple):
    """Parts whose jobs go by usage, of some models. The steps are served one after the other."""

    parts: tuple[Part, ...]
    models: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """A ready signature. `tenant`: whose jobs come first, None beyond the first tenants."""

    signature: str
    model: str
    rank: int
    ready_ms: float
    sort_ms: float
    free_ms: float
    load_justified: bool
    tenant: str | None = None
    usage: float = 0.0
    own_rank: int = 0
    turn: int = deadlines.UNDATED
    start_by: int | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """The order of rows. A model in memory goes first, or one whose jobs have been ready for its load times; then
        the least-served tenant, its priorities, its turns, the least slack, readiness."""
        slack = self.start_by or 0 if self.turn == deadlines.DATED else 0
        by_priority = (self.usage, self.own_rank, self.turn, slack)
        return (not self.load_justified, *by_priority, self.sort_ms, self.signature)


class Blocked(NamedTuple):
    """A tenant that may not start `slots` more of a model and rank. `job_id`: the overdue one that needs them."""

    tenant: str
    model: str
    rank: int
    slots: int
    job_id: str = ""


@dataclass
class SignatureOrder:
    """The order of the signatures for one request of a worker, which has `load_ms` for each of its models and takes
    jobs down to the rank `lowest`."""

    facts: QueueFacts
    load_ms: Mapping[str, int]
    lowest: int
    blocked: list[Blocked] = field(default_factory=list)
    """Tenants that were found to have no free slots."""

    def steps(self) -> list[Step]:
        """Return the steps in the order of service. While slots are due to bulk jobs, these precede standard ones."""
        models = tuple(self.facts.credits)
        steps = [Step((Part(0, ahead=True),), models)]
        if self._due:
            steps.append(Step((Part(BULK_RANK),), self._due))
        if self.lowest >= 1:
            steps.append(Step((Part(0, ahead=False), Part(1)), models))
        if self.lowest >= BULK_RANK:
            steps.append(Step((Part(BULK_RANK),), models))
        return steps

    @cached_property
    def _due(self) -> tuple[str, ...]:
        if self.lowest < BULK_RANK or self.facts.policies.bulk_share <= 0:
            return ()
        return tuple(model for model, credit in self.facts.credits.items() if credit >= 1)

    def candidates(self) -> Iterator[tuple[Row, Sequence[Row]]]:
        """Yield ready signatures in the order of service, each once, with those that it is compared with."""
        seen = set()
        for step in self.steps():
            for rows in (self.by_tenant(step), self.by_readiness(step)):
                for row in rows:
                    if row.signature not in seen:
                        seen.add(row.signature)
                        yield row, rows

    def by_tenant(self, step: Step) -> list[Row]:
        """Return the ready signatures of the least-served tenants."""
        return self._sorted(step, self._of_tenants)

    def by_readiness(self, step: Step) -> list[Row]:
        """Return the signatures that have been ready longest, for when the first tenants have none that can start."""
        return self._sorted(step, self._of_longest_ready)

    def _sorted(self, step: Step, rows: Callable[[Part, str, OrderFacts], Iterable[Row]]) -> list[Row]:
        found = (
            row
            for part in step.parts
            for model in step.models
            if (order := self.facts.orders.get((model, part.rank))) is not None
            for row in rows(part, model, order)
        )
        return sorted((row for row in found if row.free_ms <= self.facts.now_ms), key=lambda row: row.key)

    def _of_tenants(self, part: Part, model: str, order: OrderFacts) -> Iterator[Row]:
        found = 0
        for tenant in self._with_slots(model, part.rank):
            if self.includes(part, tenant.usage) and found < SIGNATURES_COMPARED:
                rows = self._rows_of(tenant, part, model, order)
                found += len(rows)
                yield from rows

    def _rows_of(self, tenant: TenantFacts, part: Part, model: str, order: OrderFacts) -> list[Row]:
        now, rows = self.facts.now_ms, []
        has_dated = any(one.start_by is not None for one in tenant.signatures)
        for one in tenant.signatures:
            if one.ready_ms > now:
                continue
            row = self.row(one.signature, model, part.rank, one.ready_ms, order)
            overtaken = one.overtaken if has_dated else 0
            rows.append(self.of_tenant(row, tenant.name, tenant.usage, one._replace(overtaken=overtaken)))
        return rows

    def of_tenant(self, row: Row, tenant: str, usage: float, one: SignatureFacts) -> Row:
        """Return the row of a signature of which this tenant's jobs come first."""
        aged = self.is_aged(one.ready_ms)
        turn = deadlines.turn(start_by=one.start_by, overtaken=one.overtaken, aged=aged)
        return replace(row, tenant=tenant, usage=usage, own_rank=row.rank, turn=turn, start_by=one.start_by)

    def _of_longest_ready(self, part: Part, model: str, order: OrderFacts) -> list[Row]:
        if not order.has_tenants or not self._has_more(part, model):
            return []
        now = self.facts.now_ms
        return [self.row(sig, model, part.rank, ready, order) for sig, ready in order.ready if ready <= now]

    def row(self, signature: str, model: str, rank: int, ready_ms: float, order: OrderFacts) -> Row:
        load = abs(self.load_ms[model])
        sort = model_loads.sort_ms(ready_ms, load, order.holders)
        free = model_loads.free_at(ready_ms, load, order.holders, order.work_ms)
        return Row(signature, model, rank, ready_ms, sort, free, not load or sort <= self.facts.now_ms)

    def _has_more(self, part: Part, model: str) -> bool:
        """Return whether signatures beyond the first tenants can be in a part.

        The first tenants have the least usage: behind one that is not ahead there is none that is.
        """
        if part.ahead is None:
            return True
        included = [self.includes(part, tenant.usage) for tenant in self._with_slots(model, part.rank)]
        return all(included) if part.ahead else any(included)

    def _with_slots(self, model: str, rank: int) -> list[TenantFacts]:
        """Return the first tenants with free slots, and note the others."""
        order = self.facts.orders.get((model, rank))
        tenants = order.tenants if order is not None else ()
        for tenant in tenants:
            blocked = Blocked(tenant.name, model, rank, 1)
            if not tenant.limit.allows(1) and blocked not in self.blocked:
                self.blocked.append(blocked)
        return [tenant for tenant in tenants if tenant.limit.allows(1)]

    def has_tried(self, tenant: str, model: str, rank: int, tried: Collection[str]) -> bool:
        """Return whether signatures of a tenant were read, and all of them are in `tried`."""
        order = self.facts.orders.get((model, rank))
        tenants = () if order is None else order.tenants
        found = [signature.signature for one in tenants if one.name == tenant for signature in one.signatures]
        return bool(found) and set(found) <= set(tried)

    def hides_tenants(self) -> bool:
        """Return whether all tenants that were read of a model and rank are blocked, and others can be behind them."""
        return any(
            len(order.tenants) >= TENANTS_READ and not any(tenant.limit.allows(1) for tenant in order.tenants)
            for order in self.facts.orders.values()
        )

    def has_longer_ready(self) -> bool:
        """Return whether a page of the signatures that have been ready longest was full."""
        now = self.facts.now_ms
        return any(len(one.ready) >= READY_READ and one.ready[-1][1] <= now for one in self.facts.orders.values())

    def includes(self, part: Part, usage: float) -> bool:
        """Return whether a part has the jobs of a tenant with this usage."""
        return part.ahead is None or (usage <= self._most_ahead) == part.ahead

    @cached_property
    def _most_ahead(self) -> float:
        """The highest GPU usage with which a tenant is ahead."""
        delayed = list(self.facts.preempted)
        for model in self.facts.credits:
            ranks = (1, BULK_RANK) if model in self._due else (1,)
            delayed += [tenants[0].usage for rank in ranks if (tenants := self._with_slots(model, rank))]
        return most_ahead(min(delayed, default=None), self.facts.policies.interactive_allowance_s, self.facts.now_ms)

    def is_aged(self, since_ms: float) -> bool:
        return since_ms <= self.facts.now_ms - self.facts.policies.aging_ms

    def overtaken(self, first: Row, rows: Sequence[Row]) -> list[tuple[str, int]]:
        """Return the aged signatures and their ranks that `first` overtakes by its deadline."""
        if first.start_by is None:
            return []
        same = (row for row in rows if (row.tenant, row.rank) == (first.tenant, first.rank))
        return [
            (row.signature, row.rank) for row in same if row.turn == deadlines.UNDATED and self.is_aged(row.ready_ms)
        ]

    def bulk_models(self) -> list[str]:
        """Return the models with ready bulk jobs, to which slots above bulk add a credit."""
        ready = {model: order.ready for (model, rank), order in self.facts.orders.items() if rank == BULK_RANK}
        return [model for model, rows in ready.items() if rows and rows[0][1] <= self.facts.now_ms]

    def bulk_growth(self, models: int) -> float:
        """Return the credit of each of so many models for a slot above bulk: bulk gets its share of the sum of both."""
        share = self.facts.policies.bulk_share
        return share / (1 - share) / models if models and share > 0 else 0.0

    def overdue(self) -> list[tuple[str, str | None]]:
        """Return the signatures of the least-served tenants that have been ready for long, each with its tenant."""
        before = self.facts.now_ms - self.facts.policies.overdue_ms
        rows = (row for step in self.steps() for row in self.by_tenant(step))
        return list(dict.fromkeys((row.signature, row.tenant) for row in rows if row.ready_ms <= before))

    def next_ready_ms(self) -> float | None:
        """Return ms until jobs are ready for this worker, 0 when they are; None when none is queued."""
        first = (
            self.row(*order.ready[0][:1], model, rank, order.ready[0][1], order).free_ms
            for (model, rank), order in self.facts.orders.items()
            if rank <= self.lowest and order.ready and order.has_tenants
        )
        earliest = min(first, default=None)
        return None if earliest is None else max(0.0, earliest - self.facts.now_ms)


def most_ahead(least: float | None, allowance_s: float, now_ms: float) -> float:
    """Return the highest usage with which a tenant is ahead of those that it delays, the least-served at `least`.

    Usage is decayed GPU-seconds as log2 on a moving time scale, 0 for none (`tenants.lua`).
    """
    if least is None:
        return math.inf
    if not allowance_s:
        return least
    allowance = math.log2(allowance_s) + now_ms / USAGE_HALF_LIFE_MS
    if least <= 0:
        return allowance
    high, low = max(least, allowance), min(least, allowance)
    return high + math.log2(1 + 2.0 ** (low - high))
