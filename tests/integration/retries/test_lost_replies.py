"""Lost replies: what was applied is applied once, whatever the client sends again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from harness.queue import claim_ids, put
from harness.tcp_proxy import TcpProxy, script_pattern

from shared.config.settings import Settings
from shared.queue import Queue, Submission

Make = Callable[..., Submission]


@pytest.fixture
async def proxy(redis_server: Any) -> AsyncIterator[TcpProxy]:
    async with TcpProxy(redis_server.port) as proxy:
        yield proxy


@pytest.fixture
async def proxied(proxy: TcpProxy, queue: Queue) -> AsyncIterator[Queue]:
    """The namespace of `queue`, through the proxy."""
    settings: Settings = queue.client.settings.model_copy(update={"redis_url": proxy.redis_url})
    proxied = Queue.connect(settings)
    yield proxied
    await proxied.close()


def lose(proxy: TcpProxy, queue: Queue, script: str, count: int = 1) -> None:
    """Lose the next replies of a script."""
    proxy.drop_replies(script_pattern(script, queue.client.settings), count)


async def test_a_submit_whose_reply_is_lost_queues_its_job_once(
    proxy: TcpProxy, proxied: Queue, make_submission: Make
) -> None:
    lose(proxy, proxied, "submit")
    one = make_submission(idempotency_key="k", fingerprint="f")
    assert await put(proxied, one) == [one.job.id]
    assert proxy.dropped == 1
    assert await claim_ids(proxied) == [one.job.id]
