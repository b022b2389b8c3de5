"""The parts of the benchmark over HTTP that decide something."""

import itertools
from collections import Counter
from pathlib import Path

import pytest

from bench import over_http
from bench.clients import Load, Meter
from bench.over_http import Beside, bodies, from_the_head, from_the_whole_line


@pytest.mark.parametrize(
    ("line", "head", "whole"),
    [
        ([6], [0], [0]),
        ([6, 8, 6], [0], [0, 2]),  # one stops at the first that differs, the other looks past it
        ([6, 6, 8, 6], [0, 1], [0, 1, 3]),
        ([8] * 12, list(range(8)), list(range(8))),  # never more rows than the model takes
    ],
)
def test_batchers_of_requests_take_equal_steps(line: list[int], head: list[int], whole: list[int]) -> None:
    assert from_the_head(line) == head
    assert from_the_whole_line(line) == whole


def test_every_three_jobs_have_all_numbers_of_steps() -> None:
    """So that the mean is that of the full batches, whatever part of the jobs is measured."""
    jobs = list(itertools.islice(bodies(3), 30))
    assert Counter(job["steps"] for job in jobs) == {6: 10, 8: 10, 10: 10}
    assert len({job["seed"] for job in jobs}) == 30


def test_a_way_is_compared_with_full_batches_on_both_sides_of_it() -> None:
    """On a machine that slows down steadily: 8 pictures in 1 s, then in 2 s, then in 3 s."""
    assert Beside(rate=8 / 2, before=8 / 1, after=8 / 3).of_full == pytest.approx(1)


def test_the_measurement_begins_when_every_client_has_had_a_picture() -> None:
    meter = Meter(Load(clients=2, pictures=3))
    for done in range(5):
        assert not meter.over, f"over after {done} of 5"
        meter.note()
    assert meter.over
    assert meter.rate > 0


def test_a_server_that_does_not_start_is_told(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="did not start"), over_http.served(tmp_path / 'no"model', tmp_path):
        pass
