"""Figures of the benchmark of models over several devices."""

from __future__ import annotations

from itertools import islice

from bench.devices import VideoShape, bodies, figures_of


def test_the_gain_is_that_within_each_turn() -> None:
    """A machine's speed drifts from turn to turn."""
    figures = figures_of({1: [1.0, 2.0, 4.0], 2: [1.5, 3.4, 7.2]})
    assert figures == {
        "videos_per_second": {"1": 2.0, "2": 3.4},
        "gain": 1.7,
        "gain_of_turns": [1.5, 1.7, 1.8],
    }


def test_jobs_differ_and_a_row_has_the_tokens_of_its_latents() -> None:
    assert [body["seed"] for body in islice(bodies(VideoShape(64, 2)), 3)] == [0, 1, 2]
    assert VideoShape(256, 12).tokens == 16 * 16 * 3
