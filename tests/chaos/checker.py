"""Compares what the client was promised with the event log, the records, the stored results and the journal."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from chaos.evidence import Evidence
from chaos.request import Request
from chaos.sleeping_engine import EPOCH_STEPS, state_in
from shared.job import State
from shared.job_record import JobRecord

PARENT_FAILED = "parent_failed"
_SHOWN = 3


@dataclass
class Report:
    """Counts of one run; `problems` has the jobs that broke a promise, by kind."""

    counts: dict[str, int] = field(default_factory=dict)
    problems: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def lines(self) -> list[str]:
        lines = [f"  {name:<28} {count:>7}" for name, count in self.counts.items()]
        for kind, found in self.problems.items():
            lines += [f"! {kind:<28} {len(found):>7}   {'; '.join(found[:_SHOWN])}"]
        return lines


PROMISES = (
    "lost",
    "terminal twice",
    "completed after canceled",
    "results twice",
    "results missing",
    "results of another job",
    "submitted twice",
    "failed unplanned",
    "client saw",
    "stale progress",
    "webhooks lost",
    "webhook events doubled",
    "taken from living workers",
    "ran while paused",
    "ran before a parent ended",
    "ran after a failed parent",
    "failed for no parent",
    "starts from another job",
    "left of deleted jobs",
    "left in the queue",
)
"""Kinds of problems; each must be empty."""


def check(evidence: Evidence) -> Report:
    """Return the report of a run."""
    report = Report()
    parts = (_check_requests, _check_ends, _check_parents, _check_sources, _check_results, _check_forwards)
    for part in (*parts, _check_pauses, _check_deletions, _check_webhooks):
        part(evidence, report)
    for kind, found in (
        ("stale progress", evidence.monitor.stale_progress),
        ("left in the queue", evidence.leftovers),
    ):
        if found:
            report.problems[kind] += found
    return report


def _check_requests(evidence: Evidence, report: Report) -> None:
    requests = evidence.requests
    of_token: defaultdict[str, set[str]] = defaultdict(set)
    for job_id, known in evidence.records.items():
        of_token[known.job.metadata.get("token", "")].add(job_id)
    for request in requests:
        jobs = (of_token[request.planned.token] | request.job_ids) - set(request.retries.values())
        if request.planned.key and len(jobs) > 1 and not request.forgotten:
            report.problems["submitted twice"].append(f"{request.planned.token}: {sorted(jobs)}")
        if request.contradiction:
            report.problems["client saw"].append(request.contradiction)
    acknowledged = {job_id for request in requests for job_id in request.job_ids}
    report.counts |= {
        "requests": len(requests),
        "acknowledged": len(acknowledged),
        "refused (429, 503)": sum(request.refused for request in requests),
        "unanswered": sum(request.unanswered for request in requests),
        "forgotten by Redis": sum(request.forgotten for request in requests),
    }


def _check_ends(evidence: Evidence, report: Report) -> None:
    states: Counter[str] = Counter()
    for request in evidence.requests:
        for job_id in () if request.forgotten else request.jobs - request.deleted:
            known = evidence.records.get(job_id)
            if known is None or not known.state.terminal:
                report.problems["lost"].append(f"{job_id}: {known.state if known else 'no record'}")
                continue
            states[known.state] += 1
            if not _is_planned(request, known):
                report.problems["failed unplanned"].append(f"{job_id}: {known.error.code if known.error else '?'}")
            if job_id not in request.job_ids:
                continue
            if (request.canceled and known.state is not State.CANCELED) or (
                request.cancel_accepted and known.state is State.SUCCEEDED
            ):
                report.problems["completed after canceled"].append(f"{job_id}: {known.state}")
            if request.seen_ends - {known.state}:
                report.problems["client saw"].append(f"{job_id}: {sorted(request.seen_ends)}, is {known.state}")
    for job_id, ends in evidence.monitor.ends.items():
        if len(ends) > 1:
            report.problems["terminal twice"].append(f"{job_id}: {', '.join(ends)}")
    report.counts |= {
        "succeeded": states[State.SUCCEEDED],
        "failed as planned": states[State.FAILED] - len(report.problems.get("failed unplanned", ())),
        "canceled": states[State.CANCELED],
        "expired": states[State.EXPIRED],
        "dead letters": evidence.dead_letters,
        "answered canceled": sum(request.canceled for request in evidence.requests),
        "cancellation accepted": sum(request.cancel_accepted for request in evidence.requests),
    }


def _is_planned(request: Request, known: JobRecord) -> bool:
    """Return whether a job may end so; `_check_parents` checks those that failed for a parent."""
    if known.state is State.FAILED:
        return request.planned.fails or (bool(known.job.parents) and _failed_for_parent(known))
    return known.state is not State.EXPIRED or "deadline_s" in request.planned.body


def _failed_for_parent(known: JobRecord) -> bool:
    return known.error is not None and known.error.code == PARENT_FAILED


def _check_parents(evidence: Evidence, report: Report) -> None:
    """Check that no job ran before the ends of its parents, and each failed if it was to fail with one of them."""
    places, counts = evidence.monitor.places, Counter[str]()
    for request in evidence.requests:
        if request.forgotten:
            continue
        if request.refused_parent:
            _check_refusal(request, evidence, report)
        for job_id in request.jobs:
            known = evidence.records.get(job_id)
            if known is None or not known.job.parents:
                continue
            began = places.get((job_id, State.RUNNING), math.inf)
            ends = {parent: _end_of(parent, evidence) for parent in known.job.parents}
            failed = [parent for parent, (state, _) in ends.items() if state is not State.SUCCEEDED]
            ended_for_one = known.state is State.CANCELED or _failed_for_parent(known)
            must_fail = failed and not (request.planned.runs_anyway and set(failed).isdisjoint(known.job.sources))
            if early := [parent for parent, (_, place) in ends.items() if began < place]:
                report.problems["ran before a parent ended"].append(f"{job_id}: {early}")
            if must_fail and (began < math.inf or not ended_for_one):
                report.problems["ran after a failed parent"].append(f"{job_id}: {known.state} after {failed}")
            if _failed_for_parent(known) and not (must_fail and _names(known, failed)):
                report.problems["failed for no parent"].append(f"{job_id}: {failed}")
            counts["children"] += 1
            counts["failed for a parent"] += _failed_for_parent(known)
            counts["ran after a failed parent"] += bool(failed) and began < math.inf
    report.counts |= counts


def _check_refusal(request: Request, evidence: Evidence, report: Report) -> None:
    """Check that a refused job is none, and that the parent named is forgotten, deleted, refused or without success."""
    state, _ = _end_of(request.refused_parent, evidence)
    source = request.source
    named = [*request.parents, *([] if source is None else [source])]
    refused = [one for one in named if request.refused_parent in (*one.job_ids, one.planned.token)]
    is_gone = any(one.forgotten or one.is_deleting or not one.job_ids for one in refused)
    has_failed = state not in (None, State.SUCCEEDED) and (source in refused or not request.planned.runs_anyway)
    is_right = is_gone or has_failed
    if request.job_ids or not is_right:
        text = f"{request.planned.token}: refused for {request.refused_parent}, {state}"
        report.problems["client saw"].append(text)


def _end_of(job_id: str, evidence: Evidence) -> tuple[State | None, float]:
    """Return the state in which a job ended and the place of that event; None and infinity if it has not."""
    known, seen = evidence.records.get(job_id), evidence.monitor.ends.get(job_id)
    state = (
        State(seen[0]) if known is None and seen else None if known is None else known.state
    )  # a deleted one was seen
    if state is None or not state.terminal:
        return None, math.inf
    return state, evidence.monitor.places.get((job_id, state), math.inf)


def _check_sources(evidence: Evidence, report: Report) -> None:
    """Check that each job starts from the job it was to start from, or that job's retry, if that had not ended."""
    counts = Counter[str]()
    for request in evidence.requests:
        for job_id in () if request.source is None or request.forgotten else request.jobs:
            known = evidence.records.get(job_id)
            for source in () if known is None else known.job.sources:
                counts["started from unfinished jobs"] += known is not None and known.state is State.SUCCEEDED
                counts["started from retries"] += source in request.source.retries.values()
                if source not in request.source.jobs:
                    report.problems["starts from another job"].append(f"{job_id}: {source}")
    report.counts |= {**counts, "retries": sum(len(request.retries) for request in evidence.requests)}


def _check_deletions(evidence: Evidence, report: Report) -> None:
    """Check that nothing is left of deleted jobs, and no sweep of their files is to come."""
    deleted = {job_id for request in evidence.requests for job_id in request.deleted if not request.forgotten}
    kept = {key.split("/")[1] for key in evidence.objects if key.startswith("jobs/")}
    report.counts |= {
        "deleted": len(deleted),
        "deletions refused": sum(request.needed for request in evidence.requests),
    }
    if left := deleted & (kept | evidence.retained | evidence.records.keys()):
        report.problems["left of deleted jobs"] += sorted(left)


def _names(known: JobRecord, parents: Sequence[str]) -> bool:
    return known.error is not None and any(parent in known.error.message for parent in parents)


def _check_results(evidence: Evidence, report: Report) -> None:
    named, of_token = set[str](), {request.planned.token: request for request in evidence.requests}
    for job_id, known in evidence.records.items():
        if known.state is not State.SUCCEEDED:
            continue
        keys = [artifact.key for artifact in known.artifacts]
        named.update(keys)
        if len({key.rpartition("/")[0] for key in keys}) > 1 or len(set(keys)) < len(keys) or len(keys) > known.job.n:
            report.problems["results twice"].append(f"{job_id}: {keys}")
        if missing := [key for key in keys if key not in evidence.objects] or len(keys) < known.job.n:
            report.problems["results missing"].append(f"{job_id}: {missing} of {keys}")
        for artifact in known.artifacts:
            data = evidence.objects.get(artifact.key)
            request = of_token[known.job.metadata["token"]]
            if data is not None and state_in(data) != request.state_of(artifact.index):
                report.problems["results of another job"].append(f"{job_id}: {artifact.key}")
    results = [key for key in evidence.objects if key.startswith("jobs/")]
    report.counts |= {"results": len(named), "files without a result": len(set(results) - named)}


def _check_forwards(evidence: Evidence, report: Report) -> None:
    pids: defaultdict[str, dict[int, int]] = defaultdict(dict)
    steps = Counter((forward.job_id, forward.step) for forward in evidence.forwards)
    succeeded = {job_id: one.job.steps for job_id, one in evidence.records.items() if one.state is State.SUCCEEDED}
    for forward in evidence.forwards:
        pids[forward.job_id][forward.epoch] = forward.pid
    paused = {job_id for request in evidence.requests if request.planned.pauses for job_id in request.job_ids}
    for job_id, runs in pids.items():
        for epoch in sorted(runs)[:-1]:
            if runs[epoch] not in evidence.lost_pids and job_id not in paused:
                report.problems["taken from living workers"].append(f"{job_id}: claim {epoch} of worker {runs[epoch]}")
    for job_id, known in evidence.records.items():
        total = known.progress.total if known.progress else 0
        if known.state is State.SUCCEEDED and total and total // EPOCH_STEPS != known.epoch:
            report.problems["stale progress"].append(f"{job_id}: stored by claim {total // EPOCH_STEPS}")
    report.counts |= {
        "jobs run again": sum(len(runs) - 1 for job_id, runs in pids.items() if job_id not in paused),
        "forwards repeated": sum(count - 1 for count in steps.values()),
        "steps of results": sum(succeeded.values()),
        "steps computed for them": sum(count for (job_id, _), count in steps.items() if job_id in succeeded),
    }


def _check_pauses(evidence: Evidence, report: Report) -> None:
    """Check that no living worker runs a job between a response that it is paused and the request to resume it."""
    pauses: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for request in evidence.requests:
        for job_id, since_s, until_s in request.paused:
            pauses[job_id].append((since_s, until_s))
    for forward in evidence.forwards:
        within = any(since_s < forward.at_s < until_s for since_s, until_s in pauses.get(forward.job_id, ()))
        if within and forward.pid not in evidence.lost_pids:
            report.problems["ran while paused"].append(f"{forward.job_id}: step {forward.step}")
    if pauses:
        report.counts["pauses of queued jobs"] = sum(map(len, pauses.values()))
        runs = {(forward.job_id, forward.epoch) for forward in evidence.forwards}
        paused = {job_id for one in evidence.requests if one.planned.pauses for job_id in one.job_ids}
        report.counts["paused jobs run again"] = sum(job_id in paused for job_id, _ in runs) - len(
            paused & {job_id for job_id, _ in runs}
        )


def _check_webhooks(evidence: Evidence, report: Report) -> None:
    if evidence.webhooks is None:
        return
    ids: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for webhook_id, job_id, kind in evidence.webhooks:
        ids[job_id, kind].add(webhook_id)
    for (job_id, kind), seen in ids.items():
        if len(seen) > 1:
            report.problems["webhook events doubled"].append(f"{job_id} {kind}: {sorted(seen)}")
    for job_id, state in evidence.ends():
        if (job_id, f"job.{state}") not in ids:
            report.problems["webhooks lost"].append(f"{job_id}: {state}")
    received = Counter(webhook_id for webhook_id, _, _ in evidence.webhooks)
    report.counts |= {"webhooks": len(received), "webhook ids repeated": sum(received.values()) - len(received)}
