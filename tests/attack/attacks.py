"""`python -m attack.attacks NAME TARGET`: one attack, without end; its process is killed by the runner.

Each attack is a coroutine of a `Target`. It counts what it was answered; the counts go to stdout once a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import aiohttp

REPORT_S = 1.0
TIMEOUT_S = 60.0
RETRY_S = 0.05
ADDRESS = ("127.0.0.2", 0)
"""Of the attacker; the other tenant has another one."""


@dataclass
class Target:
    """The API, and the hostile tenant: its key, and the port of the hosts that it controls."""

    port: int
    key: str
    hostile_port: int
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection and count it."""
        connection = await asyncio.open_connection("127.0.0.1", self.port, local_addr=ADDRESS)
        self.counts["connected"] += 1
        return connection

    @contextlib.asynccontextmanager
    async def client(self) -> Any:
        """Yield a client with the key and any number of connections."""
        headers, timeout = {"Authorization": f"Bearer {self.key}"}, aiohttp.ClientTimeout(total=TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0, local_addr=ADDRESS)
        async with aiohttp.ClientSession(self.url, headers=headers, timeout=timeout, connector=connector) as session:
            yield session

    async def send(self, client: aiohttp.ClientSession, method: str, path: str, **options: Any) -> dict[str, Any]:
        """Send a request, count its status, and return its JSON; {} for a refusal."""
        try:
            async with client.request(method, path, **options) as response:
                self.counts[str(response.status)] += 1
                body = await response.read()
                if response.status < 300 and response.content_type == "application/json":
                    return dict(json.loads(body))
                if response.status >= 400:
                    await asyncio.sleep(RETRY_S)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            self.counts[type(error).__name__] += 1
            await asyncio.sleep(RETRY_S)
        return {}


Attack = Callable[[Target], Awaitable[None]]


async def repeat(workers: int, work: Callable[[], Awaitable[object]]) -> None:
    """Repeat `work` without end, `workers` at a time."""

    async def forever() -> None:
        while True:
            await work()
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(workers):
            tasks.create_task(forever())


async def run(name: str, target: Target) -> None:
    from attack import connections, hosts, jobs, uploads

    attacks: dict[str, Attack] = {**connections.ATTACKS, **hosts.ATTACKS, **jobs.ATTACKS, **uploads.ATTACKS}
    attacking = asyncio.ensure_future(attacks[name](target))
    while not attacking.done():
        await asyncio.wait({attacking}, timeout=REPORT_S)
        print(json.dumps(target.counts), flush=True)
    attacking.result()


def encoded(target: Target) -> str:
    values = asdict(target)
    return json.dumps({name: values[name] for name in ("port", "key", "hostile_port")})


if __name__ == "__main__":
    from attack import attacks  # one module, under its own name

    asyncio.run(attacks.run(sys.argv[1], attacks.Target(**json.loads(sys.argv[2]))))
