"""When a full worker asks the queue for interactive jobs."""

from __future__ import annotations

from worker.urgent import TRUSTED_S, InteractiveHint


def test_it_asks_until_told_that_none_waits_and_again_at_a_hint() -> None:
    """And of itself after a while, whatever was told."""
    now = [100.0]
    urgent = InteractiveHint(lambda: now[0])
    assert urgent.likely
    urgent.none_waits(urgent.hints)
    assert not urgent.likely
    urgent.hint()
    assert urgent.likely
    urgent.none_waits(urgent.hints)
    now[0] += TRUSTED_S
    assert urgent.likely


def test_an_answer_from_before_the_newest_hint_is_worth_nothing() -> None:
    """The job of which the hint tells may have come after the queue looked."""
    urgent = InteractiveHint(lambda: 100.0)
    asked = urgent.hints
    urgent.hint()
    urgent.none_waits(asked)
    assert urgent.likely
