"""A headless Chromium, and services for its pages: one with a worker, one without, one with keys.

Without a Chromium the tests are skipped, and fail if `CI` is set. Each file uses one browser, and at most one service
with a worker: a start takes longer than most tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import pytest
from harness.queue import lose
from harness.waiting import wait_until
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect, sync_playwright

from shared.auth import Scope
from shared.config.settings import Settings
from shared.queue import Queue

CHROMIUM = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
"""The first one found: opening a page takes the shell 0.4 s of CPU time, and a whole Chromium 0.9 s."""

WAIT_MS = 30_000
WIDE = {"width": 1440, "height": 900}
OpenPage = Callable[..., Page]
T = TypeVar("T")


@pytest.fixture(scope="session")
def chromium() -> str:
    """Return the path of the browser."""
    path = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if path is None:
        reason = "no Chromium on the PATH: apt-get install chromium-headless-shell"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return path


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    """A browser of one file: while Playwright runs, no other test of this process can run an event loop."""
    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def shared_context(browser: Browser) -> Iterator[BrowserContext]:
    """The context of a file's pages, which so load their files once; the pages store nothing (test_keys.py)."""
    with _context(browser) as context:
        yield context


@pytest.fixture
def own_context(browser: Browser) -> Iterator[BrowserContext]:
    """A context for one test, which sets the clock of its pages."""
    with _context(browser) as context:
        yield context


@pytest.fixture
def wait_for_preview() -> Callable[[Page], None]:
    """Wait until a page has shown a preview; it is looked for in each frame, as it is shown for less than a second."""

    def wait(page: Page) -> None:
        page.wait_for_function(
            "() => document.querySelector('.run-panel .preview img')?.naturalWidth > 0", polling="raf"
        )

    return wait


@contextlib.contextmanager
def _context(browser: Browser) -> Iterator[BrowserContext]:
    """Without motion: animations take a page two thirds of its CPU time while a job runs."""
    context = browser.new_context(viewport=WIDE, reduced_motion="reduce")
    context.set_default_timeout(WAIT_MS)
    yield context
    context.close()


@pytest.fixture
def open_page(shared_context: BrowserContext) -> Iterator[OpenPage]:
    """Open a service's page; no script may fail, and nothing break the content policy."""
    pages, faults = [], []

    def opened(url: str, view: str = "", context: BrowserContext = shared_context) -> Page:
        page = context.new_page()
        pages.append(page)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
        page.goto(f"{url}/{view}")
        return page

    yield opened
    for page in pages:
        page.close()
    # A response with an error status is logged too: some tests want one.
    assert [fault for fault in faults if not fault.startswith("Failed to load resource")] == []


@pytest.fixture
def hold() -> Callable[[Page, str | re.Pattern[str]], list[Route]]:
    """Hold back the requests of a page for a URL, and return them as they come."""

    def held(page: Page, url: str | re.Pattern[str]) -> list[Route]:
        routes: list[Route] = []

        def keep(route: Route) -> None:
            routes.append(route)

        page.route(url, keep)
        return routes

    return held


@pytest.fixture(scope="module")
def working(chromium: str, make_shared_stack: Callable[..., Any]) -> Any:
    """A service with one worker."""
    return make_shared_stack().start(workers=1)


@pytest.fixture(scope="module")
def waiting(chromium: str, make_shared_stack: Callable[..., Any]) -> Any:
    """A service without workers: its jobs stay queued."""
    return make_shared_stack().start(workers=0)


@pytest.fixture(scope="module")
def keyed(chromium: str, make_shared_stack: Callable[..., Any]) -> Any:
    """A service that requires keys, with one worker."""
    stack = make_shared_stack().start(workers=1)
    key = _create_key(stack, "jobs:read,jobs:write,metrics,admin")
    wait_until(lambda: stack.client.get("/v1/jobs").status_code == 401, "keys are required")
    stack.client.headers["Authorization"] = f"Bearer {key}"
    return stack


@pytest.fixture
def create_key(keyed: Any) -> Callable[[str], str]:
    """Create a key of the service with keys, with some scopes."""
    return partial(_create_key, keyed)


@pytest.fixture(scope="module")
def create_tenant_key(keyed: Any) -> Callable[[str, str], str]:
    """Create a key of a tenant of the service with keys, with some scopes."""
    return lambda tenant, scopes: _create_key(keyed, scopes, tenant)


def _create_key(stack: Any, scopes: str, tenant: str = "default") -> str:
    async def create() -> str:
        queue = Queue.connect(Settings(redis_url=stack.env["FUSEQUEUE_REDIS_URL"]))
        try:
            token, _ = await queue.api_keys.create(tenant, frozenset(map(Scope, scopes.split(","))))
        finally:
            await queue.close()
        return token

    return _run(create())


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a thread of its own: Playwright's loop runs in this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, asyncio.wait_for(coroutine, 60)).result()


@pytest.fixture(scope="module")
def dead_letter(waiting: Any) -> Callable[[str], str]:
    """Submit a job to the service without workers and lose its claims until it is a dead letter; return its id."""
    return partial(_dead_letter, waiting)


def _dead_letter(stack: Any, prompt: str) -> str:
    job_id = str(stack.submit(prompt=prompt))

    async def die() -> None:
        queue = Queue.connect(Settings(redis_url=stack.env["FUSEQUEUE_REDIS_URL"], max_attempts=1))
        try:
            while await queue.dead_letters.get(job_id) is None:
                for claim in await queue.claims.claim("lost-worker", ["demo"], 1):
                    await lose(queue, claim.job.id)
                await queue.maintenance.reclaim()
                await asyncio.sleep(0.05)
        finally:
            await queue.close()

    _run(die())
    return job_id
