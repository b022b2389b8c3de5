"""The selection policy, as tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from worker.engine.fusion.module_proxy import SharedMethod
from worker.engine.pipelines.decode_pieces import is_piece
from worker.engine.scheduling.selection import (
    Candidate,
    aged_rank,
    free_fillers,
    is_filler,
    pieces_per_forward,
    select_calls,
)

ENCODE, DECODE, DENOISE = range(3)
INTERACTIVE, STANDARD, BULK = range(3)


def candidate(group: str = "a", rank: int = STANDARD, arrival: int = 0, stage: int = DENOISE, **more: Any) -> Candidate:
    return Candidate(group, rank, arrival, stage, more.pop("key", "same"), **more)


@pytest.mark.parametrize(
    ("candidates", "limit", "selected"),
    [
        pytest.param([candidate(arrival=2), candidate(arrival=1)], 8, [1, 0], id="all matching calls, oldest first"),
        pytest.param(
            [candidate(arrival=3), candidate(arrival=1), candidate(arrival=2)],
            2,
            [1, 2],
            id="the youngest is preempted at the limit",
        ),
        pytest.param([candidate(arrival=1), candidate(arrival=2, rank=INTERACTIVE)], 1, [1], id="priority before age"),
        pytest.param(
            [candidate(arrival=1), candidate(arrival=2, start_by_s=9.0), candidate(arrival=3, start_by_s=5.0)],
            2,
            [2, 1],
            id="the least slack before age",
        ),
        pytest.param(
            [candidate(arrival=1, rank=INTERACTIVE), candidate(arrival=2, start_by_s=1.0)],
            1,
            [0],
            id="priority before slack",
        ),
        pytest.param(
            [candidate("b", arrival=2), candidate("a", arrival=1)], 8, [1], id="the older group runs until it is done"
        ),
        pytest.param(
            [candidate("a", arrival=1), candidate("b", arrival=2, rank=INTERACTIVE)],
            8,
            [1],
            id="priority selects the group too",
        ),
        pytest.param(
            [candidate("a", arrival=1), candidate("a", arrival=9, stage=ENCODE)],
            8,
            [1],
            id="a new job catches up with its group",
        ),
        pytest.param(
            [candidate("a", arrival=1), candidate("b", arrival=0, stage=DECODE), candidate("b", arrival=2)],
            8,
            [1],
            id="a finished image is decoded first",
        ),
        pytest.param(
            [candidate("a", arrival=1), candidate("b", arrival=2, stage=ENCODE)],
            8,
            [0],
            id="a new job of another group delays no one",
        ),
        pytest.param(
            [candidate("a", arrival=1), candidate("b", arrival=2, stage=DECODE)],
            8,
            [0],
            id="nor does a finished image of another group",
        ),
        pytest.param(
            [candidate(arrival=2, key="x"), candidate(arrival=1, key="y"), candidate(arrival=3, key="y")],
            8,
            [1, 2],
            id="the calls with the oldest one's batch key",
        ),
        pytest.param(
            [
                candidate(arrival=1, key="x"),
                candidate(arrival=2, key="y", rank=INTERACTIVE),
                candidate(arrival=3, key="y"),
            ],
            8,
            [1, 2],
            id="the calls with the interactive one's batch key",
        ),
        pytest.param([candidate()], 0, [0], id="at least one call runs"),
        pytest.param([candidate(arrival=2), candidate(arrival=1)], 0, [1], id="it is the first in order"),
        pytest.param(
            [candidate(arrival=1, position=3), candidate(arrival=2, position=3), candidate(arrival=3, position=0)],
            8,
            [0, 2],
            id="one per position, the oldest",
        ),
        pytest.param(
            [candidate(arrival=1, position=3), candidate(arrival=2), candidate(arrival=3)],
            8,
            [0, 1, 2],
            id="calls without a position never collide",
        ),
        pytest.param(
            [candidate(arrival=1, stage=DECODE), candidate(arrival=2), candidate(arrival=3, stage=DECODE)],
            8,
            [0, 2],
            id="finished images are decoded together",
        ),
        pytest.param(
            [candidate(arrival=1, stage=DECODE), candidate(arrival=2, stage=ENCODE)],
            8,
            [1],
            id="a new job is encoded before finished images are decoded",
        ),
    ],
)
def test_select_calls(candidates: list[Candidate], limit: int, selected: list[int]) -> None:
    """Order by priority, then slack, then age; one group at a time; in it the earliest stage first."""
    assert select_calls(candidates, lambda _matching, _own: limit) == selected


@pytest.mark.parametrize(
    ("candidates", "expected"),
    [
        pytest.param([candidate("b", arrival=2), candidate("a", arrival=1)], ([1], 1), id="the calls of one group"),
        pytest.param(
            [candidate(rank=BULK), candidate(arrival=1, rank=BULK)], ([0, 1], 2), id="bulk calls with each other"
        ),
        pytest.param(
            [candidate(rank=BULK), candidate(arrival=1)], ([1, 0], 2), id="with standard calls they are no fillers"
        ),
        pytest.param(
            [candidate(rank=BULK), candidate(arrival=1, rank=INTERACTIVE), candidate(arrival=2)],
            ([1, 2, 0], 2),
            id="with interactive calls they are",
        ),
    ],
)
def test_the_limit_gets_the_matching_calls_in_order(
    candidates: list[Candidate], expected: tuple[list[int], int]
) -> None:
    """With the number of calls that are no fillers: limits differ by model and shape."""
    seen: list[tuple[list[int], int]] = []
    select_calls(candidates, lambda matching, own: seen.append((list(matching), own)) or 8)  # type: ignore[func-returns-value]
    assert seen == [expected]


@pytest.mark.parametrize("stage", [ENCODE, DECODE])
def test_the_stage_of_a_bulk_call_does_not_delay_an_interactive_one(stage: int) -> None:
    """A new or finished bulk job catches up once no interactive call is parked."""
    bulk, interactive, standard = (
        candidate(rank=BULK, stage=stage),
        candidate(arrival=1, rank=INTERACTIVE),
        candidate(arrival=2),
    )
    assert select_calls([bulk, interactive], lambda matching, _own: len(matching)) == [1]
    assert select_calls([bulk, standard], lambda matching, _own: len(matching)) == [0]


@pytest.mark.parametrize(
    ("rank", "first_rank", "filler"),
    [
        (BULK, INTERACTIVE, True),
        (STANDARD, INTERACTIVE, False),
        (INTERACTIVE, INTERACTIVE, False),
        (BULK, STANDARD, False),
        (BULK, BULK, False),
    ],
)
def test_only_bulk_calls_with_interactive_ones_are_fillers(rank: int, first_rank: int, filler: bool) -> None:
    assert is_filler(candidate(rank=rank), candidate(rank=first_rank)) is filler


FLAT_UP_TO_FOUR = {1: 1.0, 2: 1.01, 3: 1.01, 4: 1.04, 5: 1.3, 6: 1.5, 8: 1.9}


@pytest.mark.parametrize(
    ("own", "fillers", "seconds", "taken", "reason"),
    [
        (1, 7, {}, 0, "the time without fillers is measured first"),
        (1, 7, {8: 1.0}, 0, "whatever other times are known"),
        (1, 7, {1: 1.0}, 1, "then one filler is tried"),
        (1, 7, {1: 1.0, 2: 1.3}, 0, "it is not free if one row uses the whole processor"),
        (1, 7, {1: 1.0, 2: 1.01}, 3, "free fillers are doubled"),
        (1, 7, FLAT_UP_TO_FOUR, 3, "up to where the forward gets slower"),
        (1, 2, FLAT_UP_TO_FOUR, 2, "never more than there are"),
        (3, 5, FLAT_UP_TO_FOUR, 1, "more own calls leave room for fewer fillers"),
        (4, 4, FLAT_UP_TO_FOUR, 0, "and finally for none"),
        (1, 0, {1: 1.0}, 0, "there are no fillers"),
        (1, 7, {1: 1.0, 2: 1.05, 4: 1.05, 8: 1.05}, 7, "a slowdown of one step in twenty is accepted"),
        (1, 7, {1: 1.0, 2: 1.0, 4: 1.2}, 1, "a count that was too slow is not tried again"),
    ],
)
def test_bulk_calls_fill_an_interactive_forward_where_that_is_free(
    own: int, fillers: int, seconds: dict[int, float], taken: int, reason: str
) -> None:
    assert free_fillers(own, fillers, seconds.get) == taken, reason


@pytest.mark.parametrize(
    ("rank", "preempted_s", "aged", "reason"),
    [
        (BULK, 0.0, BULK, "a bulk job that was not preempted"),
        (BULK, 29.9, BULK, "the aging time is not over"),
        (BULK, 30.0, STANDARD, "it rises to the standard jobs"),
        (BULK, 60.0, INTERACTIVE, "then to the interactive jobs; as the oldest of them it runs until it is done"),
        (BULK, 1e6, INTERACTIVE, "there is no higher priority"),
        (STANDARD, 29.9, STANDARD, "a standard job before the aging time"),
        (STANDARD, 30.0, INTERACTIVE, "a standard job can rise once"),
        (INTERACTIVE, 1e6, INTERACTIVE, "an interactive job cannot rise"),
    ],
)
def test_a_job_that_is_preempted_for_long_rises_in_priority(
    rank: int, preempted_s: float, aged: int, reason: str
) -> None:
    """A stream of interactive jobs cannot starve a bulk job."""
    assert aged_rank(rank, preempted_s, aging_s=30.0) == aged, reason


@pytest.mark.parametrize(
    ("piece_s", "forward_s", "pieces"),
    [
        (None, 2.0, 1),  # unknown
        (0.5, None, 1),
        (0.5, 2.0, 4),
        (0.6, 2.0, 3),  # no longer than a forward
        (3.0, 2.0, 1),
        (0.0, 2.0, 1),
    ],
)
def test_pieces_of_a_decode_take_as_long_as_a_forward(
    piece_s: float | None, forward_s: float | None, pieces: int
) -> None:
    assert pieces_per_forward(piece_s, forward_s) == pieces


@pytest.mark.parametrize(("component", "expected"), [("geo_decoder", True), ("shape_vae", False)])
def test_the_chunks_of_a_mesh_let_steps_of_batch_mates_in_between(component: str, expected: bool) -> None:
    """A mesh has 57 million points in chunks of some thousands, for all of which its batch mates waited."""
    assert is_piece(SharedMethod(component, "forward", torch.nn.Identity())) is expected
