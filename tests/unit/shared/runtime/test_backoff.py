"""Delays between attempts."""

from __future__ import annotations

from shared.runtime.backoff import backoff_s


def test_a_delay_doubles_with_each_failure_up_to_a_bound() -> None:
    assert [backoff_s(failures, 0.5, 3.0) for failures in (0, 1, 2, 3, 4, 10_000)] == [0.5, 0.5, 1.0, 2.0, 3.0, 3.0]
