"""The loads: clients in a closed loop, and arrivals at random times, of requests for one image each."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from bench.common.clients import LightClient, light_client, together
from bench.common.service import SIDE
from bench.over_http import STEPS, bodies
from bench.peers.servers.batch_call import ROUTE

MEAN_STEPS = round(statistics.mean(STEPS))
PNG_BASE64 = "iVBORw0KGgo"  # a PNG's first eight bytes, as base64

WARM_UP_IMAGES = 48  # BentoML's dispatcher learns from the first 27 batches
GROUP_GAP_S = 0.005  # between images of one group less, between groups more: a forward of one row takes 8 ms

Body = dict[str, object]


@dataclass(frozen=True)
class PeerLoad:
    """`clients` in a closed loop, or arrivals at `share` of the rate of full batches; steps equal or mixed."""

    name: str
    clients: int = 0
    share: float = 0.0
    mixed: bool = False


LOADS = {
    load.name: load
    for load in (
        PeerLoad("closed-1", clients=1),
        PeerLoad("poisson-0.6", share=0.6),
        PeerLoad("poisson-0.9", share=0.9),
        PeerLoad("closed-8", clients=8),
        PeerLoad("closed-32", clients=32),
        PeerLoad("mixed", clients=32, mixed=True),
    )
}
"""Run in this order, from light to heavy: BentoML's dispatcher keeps the waits that it learned under more load."""


class ImageClient:
    """Requests images from one server; a body is wrapped into a list in `list_field` where the server wants one."""

    def __init__(self, url: str, list_field: str | None = None) -> None:
        self._url = url
        self._list_field = list_field

    def connect(self) -> AbstractAsyncContextManager[LightClient]:
        return light_client(self._url)

    async def image(self, http: LightClient, body: Body) -> str:
        """Request one image and return it as base64; raises `RuntimeError` if the response has none."""
        response = await http.post(ROUTE, {self._list_field: [body]} if self._list_field else body)
        (one,) = response if self._list_field else [response]
        image = str(one["data"][0]["b64_json"])
        if not image.startswith(PNG_BASE64):
            raise RuntimeError(f"the response has no PNG image: {str(one)[:500]}")
        return image


def requests(seed: int, mixed: bool) -> Iterator[Body]:
    """Yield requests without end."""
    more = {"size": f"{SIDE}x{SIDE}", "response_format": "b64_json"}
    for body in bodies(seed):
        yield body | more | ({} if mixed else {"steps": MEAN_STEPS})


def arrivals(seed: int, rate: float, seconds: float) -> list[float]:
    """Return the times of a Poisson process of `rate` per second; a seed's gaps are the same at every rate."""
    rng = random.Random(seed)
    times = itertools.accumulate(rng.expovariate(1.0) / rate for _ in itertools.count())
    return list(itertools.takewhile(lambda at: at < seconds, times))


def steady_rate(ended: Sequence[float], first: int, images: int) -> float:
    """Return images per second of about `images` that end after the first ones, from sorted times.

    A server ends up to 24 at once. Counted from an image in the midst of these, the others would take no time: with 48
    images, a server of one image per second was measured at 0.75 to 1.5. So the end of such a group is both bounds.
    """

    def group_end(at: int) -> int:
        return next((i for i in range(at, len(ended) - 1) if ended[i + 1] - ended[i] > GROUP_GAP_S), len(ended) - 1)

    begin, end = group_end(first - 1), group_end(first + images - 1)
    if begin == end:
        raise ValueError(f"{images} images are too few: they end together; raise --images")
    return (end - begin) / (ended[end] - ended[begin])


async def closed_loop(client: ImageClient, load: PeerLoad, images: int, seed: int) -> float:
    """Return the images per second of clients that request the next image when they have one."""
    ended, jobs = list[float](), requests(seed, load.mixed)

    async with client.connect() as http:

        async def run() -> None:
            while len(ended) < load.clients + images:
                await client.image(http, next(jobs))
                ended.append(time.perf_counter())

        await together(load.clients, run)
    return steady_rate(ended, load.clients, images)


async def open_loop(client: ImageClient, times: list[float], seed: int) -> list[float]:
    """Return the seconds from each arrival to its response."""
    latencies: list[float] = []
    async with client.connect() as http, asyncio.TaskGroup() as tasks:
        started = time.perf_counter()

        async def run(at: float, body: Body) -> None:
            await client.image(http, body)
            latencies.append(time.perf_counter() - started - at)

        for at, body in zip(times, requests(seed, mixed=False), strict=False):
            await asyncio.sleep(max(0.0, started + at - time.perf_counter()))
            tasks.create_task(run(at, body))
    return latencies


async def warm_up(client: ImageClient, load: PeerLoad, rate: float, seed: int) -> None:
    """Run a short form of `load`, where `rate` is that of full batches."""
    if load.clients:
        await closed_loop(client, load, WARM_UP_IMAGES, seed)
    else:
        await open_loop(client, arrivals(seed, load.share * rate, WARM_UP_IMAGES / rate), seed)
