"""How a worker gets jobs: read what is queued, choose by the order, take what is still queued."""

import asyncio
import json
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import starmap

from shared.queue.order import deadlines
from shared.queue.order.decision import Decision, Overtakes
from shared.queue.order.facts import SignatureQueue, queue_facts, signature_queue
from shared.queue.order.jobs import Batch, JobSelection
from shared.queue.order.joining import Joining
from shared.queue.order.signatures import Blocked, Row, SignatureOrder, Step
from shared.queue.script_arguments import ModelLoad
from shared.queue.scripts import ClaimRow, Scripts
from shared.runtime.backoff import backoff_s

MOST_SIGNATURES = 16
"""Signatures of which a claim reads the jobs."""

MOST_ORDER_READS = 64
"""How often a claim reads the order: again when no tenant that it read has free slots, as these are not read again."""

MOST_READY_PAGES = 4
"""Pages of the signatures that have been ready longest of which a claim reads the first ones that are ready."""

MOST_LANE_READS = 10
"""How often the jobs of a signature are read: again when other workers took those that were chosen, or when some have
lost their place, and for further tenants."""

CONFLICT_PAUSE_S, MAX_CONFLICT_PAUSE_S = 0.002, 1.0
"""Longest pause after the first conflict; it doubles."""


@dataclass
class Tried:
    """The signatures that a claim has tried, each with the tenant that was read in any case."""

    rows: set[tuple[str, str | None]] = field(default_factory=set)

    @property
    def signatures(self) -> set[str]:
        return {signature for signature, _ in self.rows}

    def has(self, row: Row) -> bool:
        """Return whether a signature was tried; for another tenant of it, it is tried again."""
        return (row.signature, row.tenant) in self.rows or (row.tenant is None and row.signature in self.signatures)


class Repeated(Exception):
    """The request repeats one whose reply was lost; `rows` is what that one has claimed."""

    def __init__(self, rows: list[ClaimRow]) -> None:
        super().__init__()
        self.rows = rows


@dataclass
class JobChooser:
    """Chooses and takes jobs for one request of a worker, which has a token of its own.

    `load_ms`: of the worker's models, 0 in memory, negative when the last load failed. `slots` of its `capacity` are
    free. `lowest` is a rank. `page`: of the signatures that have been ready longest; those before gave this worker
    nothing lately.
    """

    scripts: Scripts
    worker: str
    token: str
    load_ms: Mapping[str, int]
    slots: int
    capacity: int
    lowest: int
    preempted: Collection[str] = ()
    page: int = 0

    async def claim(self, batch: Batch) -> list[ClaimRow]:
        """Claim jobs of the first signature that has any for this worker, for a new batch."""
        tried = Tried()
        pages = 0
        for _ in range(MOST_ORDER_READS):
            try:
                order = await self._read_order()
            except Repeated as repeated:
                return repeated.rows
            claims = await self._claim_first(order, tried, batch)
            blocked = await self._defer(order.blocked)
            if claims is not None:
                return claims
            if blocked and order.hides_tenants():
                continue
            if not order.has_longer_ready() and not self.page:
                break
            self.page = self.page + 1 if order.has_longer_ready() else 0
            pages += 1
            if pages == MOST_READY_PAGES:
                break
        return []

    async def _claim_first(self, order: SignatureOrder, tried: Tried, batch: Batch) -> list[ClaimRow] | None:
        """Return claims of the first signature that gives any, empty if slots are kept for a large job; else None."""
        short: dict[tuple[str, str, int], Blocked] = {}
        for row, rows in order.candidates():
            if tried.has(row) or len(tried.rows) >= MOST_SIGNATURES:
                continue
            tried.rows.add((row.signature, row.tenant))
            queue = await self._read_lanes(row.signature, tenant=row.tenant)
            if queue is None:
                continue
            overtakes = Overtakes(order.overtaken(row, rows), row.rank if row.turn == deadlines.OVERTAKEN else None)
            claims, selection = await self._fill(order, queue, order.steps(), overtakes, batch)
            await self._reserve(selection)
            if claims or selection.held:
                return claims
            blocked = (one for one in selection.blocked.values() if not one.job_id)
            short |= {(one.tenant, one.model, one.rank): one for one in blocked}
        signatures = tried.signatures
        order.blocked += [one for one in short.values() if order.has_tried(one.tenant, one.model, one.rank, signatures)]
        return None

    async def join(self, signature: str) -> list[ClaimRow] | None:
        """Claim jobs that may join a running batch of `signature`; None if jobs are held back for another one."""
        try:
            order, queue = await asyncio.gather(self._read_order(), self._read_lanes(signature))
        except Repeated as repeated:
            return repeated.rows
        if queue is None:
            return []
        joining = Joining(order, queue)
        steps, held_back = joining.allowed_steps()
        claims: list[ClaimRow] = []
        if steps:
            claims, selection = await self._fill(order, queue, steps, Overtakes(joining.overtaken), Batch.RUNNING)
            await self._reserve(selection)
        return None if held_back and not claims else claims

    async def _fill(
        self,
        order: SignatureOrder,
        queue: SignatureQueue,
        steps: Sequence[Step],
        overtakes: Overtakes,
        batch: Batch,
    ) -> tuple[list[ClaimRow], JobSelection]:
        """Claim jobs of a signature; return the claims and the last selection.

        Jobs are read again while others took those that were chosen, or those that were read have lost their place.
        """
        ranks = [part.rank for step in steps if queue.model in step.models for part in step.parts]
        page, last = 0, queue
        for attempt in range(MOST_LANE_READS):
            decision = Decision(overtakes=overtakes)
            selection = JobSelection(last, self.slots, self.capacity, order, batch, decision)
            selection.select(steps)
            claims, conflict = await self._take(order, selection)
            if claims or selection.held:
                return claims, selection
            if conflict:
                await asyncio.sleep(random.uniform(0, backoff_s(attempt + 1, CONFLICT_PAUSE_S, MAX_CONFLICT_PAUSE_S)))
            elif last.has_more and not decision.remove and any(last.jobs[rank] for rank in ranks):
                page += 1
            elif not decision.remove:
                break
            following = await self._read_lanes(queue.signature, page, lowest=max(ranks))
            if following is None:
                break
            last = following
        return [], selection

    async def has_overdue(self) -> bool:
        """Return whether a claim of this worker without jobs would take some of an overdue signature."""
        order = await self._read_order()
        for signature, tenant in order.overdue()[:MOST_SIGNATURES]:
            queue = await self._read_lanes(signature, tenant=tenant)
            if queue is None:
                continue
            if JobSelection(queue, self.slots, self.capacity, order, Batch.ALONE).select(order.steps()).take:
                return True
        return False

    async def next_ready_ms(self) -> float | None:
        """Return ms until jobs are ready for this worker; None when none is queued that it can claim."""
        return (await self._read_order(tenants=False)).next_ready_ms()

    async def _read_order(self, *, tenants: bool = True) -> SignatureOrder:
        models, preempted = starmap(ModelLoad, self.load_ms.items()), " ".join(self.preempted)
        wire = json.loads(
            await self.scripts.read_order(self.worker, self.token, preempted, self.page, tenants, *models)
        )
        if "claims" in wire:
            raise Repeated(wire["claims"] or [])
        return SignatureOrder(queue_facts(wire), self.load_ms, self.lowest)

    async def _read_lanes(
        self, signature: str, page: int = 0, *, tenant: str | None = None, lowest: int | None = None
    ) -> SignatureQueue | None:
        """Read a page of the tenants with queued jobs of a signature, down to a rank, and one more of them."""
        lowest = self.lowest if lowest is None else lowest
        wire = await self.scripts.read_lanes(self.worker, signature, self.slots, lowest, page, tenant or "")
        return signature_queue(signature, self.worker, wire)

    async def _take(self, order: SignatureOrder, selection: JobSelection) -> tuple[list[ClaimRow], bool]:
        """Return the claims, and whether chosen jobs were no longer queued."""
        decision, queue = selection.decision, selection.queue
        if not decision.changes_jobs:
            return [], False
        models = order.bulk_models()
        wire = decision.wire(models, order.bulk_growth(len(models)))
        hold = self.load_ms.get(queue.model, -1) >= 0
        changed, claims = await self.scripts.take(self.worker, self.token, queue.signature, hold, wire)
        return claims, changed > 0

    async def _reserve(self, selection: JobSelection) -> None:
        """Keep the slots that tenants at their limit get free for their overdue jobs."""
        await self._defer([one for one in selection.blocked.values() if one.job_id])

    async def _defer(self, blocked: Sequence[Blocked]) -> bool:
        """Take tenants without free slots out of the orders; return whether there are any."""
        if blocked:
            await self.scripts.defer(*blocked)
        return bool(blocked)
