import asyncio

import pytest

from bench.api.__main__ import Compared, table
from bench.api.http_load import ClosedLoop, LoopRate, get, post, run


def test_the_ratio_is_the_median_of_the_ratios_within_each_turn() -> None:
    compared = Compared(
        api=[LoopRate(9, 100, 10, 20), LoopRate(9, 300, 10, 40), LoopRate(9, 90, 10, 30)],
        plain=[LoopRate(9, 200, 1, 2), LoopRate(9, 400, 1, 2), LoopRate(9, 100, 1, 2)],
        cpu=[{"api": 0.5, "redis": 0.1, "others": 0.0}] * 3,
        plain_cpu=[{"api": 0.0, "redis": 0.0, "others": 0.2}] * 3,
    )
    figures = compared.figures()
    assert figures["ratio"] == 0.75
    assert figures["ratio_of_turns"] == [0.5, 0.75, 0.9]
    assert (figures["per_second"], figures["plain_per_second"]) == (100, 200)
    assert (figures["p50_ms"], figures["p99_ms"], figures["p99_of_p50"]) == (10, 30, 3)
    assert "| submit, 8 connections | 100 | 200 | 0.75 | 10 | 30 | 0.5 | 0.1 | 0.2 |" in table(
        {"submit, 8 connections": figures, "bulk_lines_per_second": 1000}
    )


WHOLE = b"HTTP/1.1 202 Accepted\r\nContent-Length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"


async def _rate(response: bytes) -> tuple[LoopRate, list[bytes]]:
    """Run a load against a server that sends `response` in two pieces, and return its rate and the requests."""
    seen, connections = [], list[asyncio.Task[None] | None]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(asyncio.current_task())
        while request := await reader.read(65536):
            seen.append(request)
            for piece in (response[:-3], response[-3:]):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        try:
            return await run(port, ClosedLoop(3, 0.05, lambda: post("/x", b"{}"))), seen
        finally:
            await asyncio.gather(*filter(None, connections))


@pytest.mark.parametrize("response", [WHOLE, CHUNKED])
async def test_each_connection_waits_for_its_response_and_sends_the_next_request(response: bytes) -> None:
    rate, requests = await _rate(response)
    assert (rate.requests, rate.per_second > 0) == (len(requests), True)
    assert 0 < rate.p50_ms <= rate.p99_ms
    assert len(requests) > 3
    assert set(requests) == {post("/x", b"{}")}
    assert post("/x", b"{}").startswith(b"POST /x HTTP/1.1\r\n")
    assert get("/x").endswith(b"\r\n\r\n")


async def test_an_error_response_ends_the_load_with_its_text() -> None:
    with pytest.raises(RuntimeError, match="no such model"):
        await _rate(b"HTTP/1.1 404 Not Found\r\nContent-Length: 13\r\n\r\nno such model")
