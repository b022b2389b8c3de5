"""Workers: their heartbeats and costs, and what waits for them."""

from shared.queue.workers.depths import MAX_COUNTED
from shared.queue.workers.workers import MAX_SIGNATURES, WORKER_TTL_S, Workers

__all__ = ["MAX_COUNTED", "MAX_SIGNATURES", "WORKER_TTL_S", "Workers"]
