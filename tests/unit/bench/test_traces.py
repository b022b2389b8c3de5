"""The cost of traces, from the figures of paired turns."""

from bench.api.traces import TracedTurn, figures_of


def test_the_cost_is_what_the_tracing_processes_take_more_relative_to_all() -> None:
    """The engine's time, which varies most, is in the denominator only."""
    plain = [TracedTurn(10, 100, 20), TracedTurn(10, 100, 20), TracedTurn(10, 100, 20)]
    traced = [TracedTurn(10, 130, 20.5), TracedTurn(9, 90, 21), TracedTurn(10, 100, 26)]
    figures = figures_of(plain, traced)
    assert figures["cost_of_turns"] == [0.005, 0.01, 0.06]
    assert figures["cost"] == 0.01
    assert figures["rate_of_off"] == 1.0
