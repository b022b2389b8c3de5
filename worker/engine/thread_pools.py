"""The end of thread pools."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

END_S = 1.0


def end(*pools: ThreadPoolExecutor) -> None:
    """Cancel the work that waits in pools, and wait until their threads have ended, but briefly for one that works."""
    for pool in pools:
        pool.shutdown(wait=False, cancel_futures=True)

    def wait() -> None:
        for pool in pools:
            pool.shutdown()

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(END_S)
