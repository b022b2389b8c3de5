"""Decisions and figures of the benchmark over HTTP."""

import itertools
from collections import Counter
from pathlib import Path

import pytest

from bench import over_http
from bench.common.clients import ClientLoad, Meter
from bench.over_http import ComparedRate, bodies, match_all, match_head


@pytest.mark.parametrize(
    ("queue", "head", "whole"),
    [
        ([6], [0], [0]),
        ([6, 8, 6], [0], [0, 2]),  # the head ends at the first that differs
        ([6, 6, 8, 6], [0, 1], [0, 1, 3]),
        ([8] * 12, list(range(8)), list(range(8))),  # never more than the model's rows
    ],
)
def test_request_batchers_select_equal_steps(queue: list[int], head: list[int], whole: list[int]) -> None:
    assert match_head(queue) == head
    assert match_all(queue) == whole


def test_every_three_jobs_have_all_step_counts() -> None:
    """The mean is that of the full batches, whichever jobs are measured."""
    jobs = list(itertools.islice(bodies(3), 30))
    assert Counter(job["steps"] for job in jobs) == {6: 10, 8: 10, 10: 10}
    assert len({job["seed"] for job in jobs}) == 30


def test_a_method_is_compared_with_the_full_batches_before_and_after_it() -> None:
    """On a machine that slows down steadily: 8 images in 1 s, then in 2 s, then in 3 s."""
    assert ComparedRate(rate=8 / 2, before=8 / 1, after=8 / 3).of_full == pytest.approx(1)


def test_the_measurement_begins_after_one_image_per_client() -> None:
    meter = Meter(ClientLoad(clients=2, images=3))
    for done in range(5):
        assert not meter.over, f"over after {done} of 5"
        meter.count()
    assert meter.over
    assert meter.rate > 0


def test_a_server_that_does_not_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="did not start"), over_http.served(tmp_path / 'no"model', tmp_path):
        pass
