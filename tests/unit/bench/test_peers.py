"""Decisions and figures of the comparison with other model servers."""

import itertools

import pytest

from bench.peers.peer_loads import LOADS, arrivals, requests, steady_rate
from bench.peers.peer_report import medians, table, to_best_peer
from bench.peers.servers.batch_call import groups
from bench.peers.side_by_side import Bare, MeasuredRow, closed_ratio, rotated


def test_arrivals_are_the_same_at_every_rate_but_for_their_scale() -> None:
    slow, fast = arrivals(3, rate=10, seconds=200), arrivals(3, rate=20, seconds=100)
    assert slow == pytest.approx([2 * at for at in fast])
    assert len(slow) == pytest.approx(2000, rel=0.1)
    assert slow != arrivals(4, rate=10, seconds=200)


@pytest.mark.parametrize("sizes", [[1], [8], [24, 8], [3, 24, 1, 17]])
@pytest.mark.parametrize("first", [1, 8, 32])
def test_a_rate_does_not_depend_on_how_many_images_end_at_once(sizes: list[int], first: int) -> None:
    """A server of ten images per second, which ends as many at once as it has taken."""
    ended, now = list[float](), 0.0
    for size in itertools.islice(itertools.cycle(sizes), 400 // min(sizes)):
        now += size / 10
        ended += [now + 0.001 * at for at in range(size)]
    assert steady_rate(ended, first, images=100) == pytest.approx(10, rel=0.01)


def test_too_few_images_for_a_rate_are_an_error() -> None:
    with pytest.raises(ValueError, match="raise --images"):
        steady_rate([0.0] * 24, first=8, images=8)


def test_only_the_mixed_load_has_several_step_counts() -> None:
    assert {body["steps"] for body in itertools.islice(requests(1, mixed=False), 9)} == {8}
    assert {body["steps"] for body in itertools.islice(requests(1, mixed=True), 9)} == {6, 8, 10}


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([], []),
        ([6, 8, 6], [[0, 2], [1]]),
        ([8] * 10, [list(range(8)), [8, 9]]),  # never more than the model's rows
    ],
)
def test_a_peer_calls_the_pipeline_for_equal_steps(steps: list[int], expected: list[list[int]]) -> None:
    assert list(groups(steps)) == expected


def test_one_client_is_compared_by_time_and_several_by_images_per_second() -> None:
    """On a machine that slows down steadily: 8 images in 1 s, then in 2 s, then in 3 s."""
    before, after = Bare(full_rate=8 / 1, solo_s=0.4), Bare(full_rate=8 / 3, solo_s=0.6)
    assert closed_ratio(LOADS["closed-1"], 2.0, before, after) == pytest.approx(1)
    assert closed_ratio(LOADS["closed-8"], 8 / 2, before, after) == pytest.approx(1)


def test_every_server_is_once_in_every_place() -> None:
    orders = [rotated(["a", "b", "c"], turn) for turn in range(3)]
    assert [set(place) for place in zip(*orders, strict=True)] == [{"a", "b", "c"}] * 3


def test_fusequeue_is_compared_with_the_peer_that_is_best_at_the_median() -> None:
    ratios = {
        ("fusequeue", "closed-8"): [0.9, 0.8, 0.1],
        ("mosec", "closed-8"): [0.5, 0.4, 0.9],
        ("ray", "closed-8"): [0.3, 0.3, 0.3],
        ("fusequeue", "closed-1"): [1.2],
        ("mosec", "closed-1"): [1.5],
        ("ray", "closed-1"): [2.0],
    }
    measured = [
        MeasuredRow(server, row, turn, ratio, value=1.0)
        for (server, row), turns in ratios.items()
        for turn, ratio in enumerate(turns)
    ]
    assert to_best_peer(medians(measured)) == {"closed-8": 0.8 / 0.5, "closed-1": 0.8}
    assert "| 0.800 | 0.500 | 0.300 | 1.6 |" in table(medians(measured))


def test_without_peers_there_is_nothing_to_compare_with() -> None:
    assert to_best_peer(medians([MeasuredRow("fusequeue", "mixed", 0, 0.9, 30.0)])) == {}
