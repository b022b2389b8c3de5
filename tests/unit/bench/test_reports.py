"""Reports of the benchmarks that no test runs: they start many servers, or others' from their packages."""

from __future__ import annotations

import asyncio

import pytest

from bench import cost
from bench.api import __main__ as api
from bench.api.http_load import ClosedLoop, LoopRate, post, run
from bench.peers import peer_report
from bench.peers.side_by_side import MeasuredRow


def test_the_api_is_compared_within_each_turn() -> None:
    compared = api.Compared(
        api=[LoopRate(9, 100, 10, 20), LoopRate(9, 300, 10, 40), LoopRate(9, 90, 10, 30)],
        plain=[LoopRate(9, 200, 1, 2), LoopRate(9, 400, 1, 2), LoopRate(9, 100, 1, 2)],
        cpu=[{"api": 0.5, "redis": 0.1, "others": 0.0}] * 3,
        plain_cpu=[{"api": 0.0, "redis": 0.0, "others": 0.2}] * 3,
    )
    figures = compared.figures()
    names = ("per_second", "plain_per_second", "ratio", "p50_ms", "p99_ms")
    assert [figures[name] for name in names] == [100, 200, 0.75, 10, 30]
    assert figures["cpu_ms"] == {"api": 0.5, "redis": 0.1, "plain route": 0.2}


@pytest.mark.parametrize("status", [b"202 Accepted", b"404 Not Found"])
async def test_a_load_is_sent_until_an_error(status: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(65536):
            writer.write(b"HTTP/1.1 %s\r\nContent-Length: 2\r\n\r\nok" % status)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    load = run(server.sockets[0].getsockname()[1], ClosedLoop(3, 0.05, lambda: post("/x", b"{}")))
    async with server:
        if status.startswith(b"404"):
            with pytest.raises(RuntimeError, match="ok"):
                await load
        else:
            rate = await load
            assert rate.requests > 3
            assert 0 < rate.p50_ms <= rate.p99_ms


def test_the_cost_of_each_part_is_the_median_without_the_model() -> None:
    assert cost.part_of("/venv/bin/python -P -m api.chores") == "chores"
    turns = [({"engine": 60.0}, 40.0), ({"engine": 70.0}, 50.0), ({"engine": 90.0}, 60.0)]
    assert cost.figures_of(turns)["engine, less model"] == 20.0


def test_fusequeue_is_compared_with_the_peer_that_is_best_at_the_median() -> None:
    ratios = {"fusequeue": [0.9, 0.8, 0.1], "mosec": [0.5, 0.4, 0.9], "ray": [0.3, 0.3, 0.3]}
    measured = [
        MeasuredRow(server, "closed-8", turn, ratio, value=1.0)
        for server, turns in ratios.items()
        for turn, ratio in enumerate(turns)
    ]
    medians = peer_report.medians(measured)
    assert medians == {"closed-8": {"fusequeue": 0.8, "mosec": 0.5, "ray": 0.3}}
    assert peer_report.to_best_peer(medians) == {"closed-8": 0.8 / 0.5}
