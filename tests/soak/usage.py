"""What a stack uses: Redis' memory, keys and streams, and memory and open files of each process."""

from __future__ import annotations

import os
from pathlib import Path

from chaos.processes import Cluster
from redis import Redis

KB = 1024


def usage(cluster: Cluster) -> dict[str, float]:
    """Return the figures of this moment, by name; memory in KB."""
    figures: dict[str, float] = {}
    with cluster.redis.client as client:
        client.memory_purge()  # freed pages stay resident for a while; those of libc's allocator for good
        info = client.info()
        # The event stream has a fixed length, which a short run does not reach.
        events = (client.memory_usage(cluster.keys.events, samples=0) or 0) // KB
        figures["redis: KB without the event stream"] = info["used_memory"] // KB - events
        if str(info["mem_allocator"]).startswith("jemalloc"):
            figures["redis: KB resident without the event stream"] = resident_kb(info["process_id"]) - events
        figures["redis: keys"] = client.dbsize()
        figures["redis: streams"] = count_streams(client)
        figures["redis: connections"] = info["connected_clients"]
        figures["redis: open files"] = open_files(info["process_id"])
    numbers: dict[str, int] = {}
    for process in cluster.processes:
        if process.status is not None:
            raise RuntimeError(f"{process.role} ended with status {process.status}: {process.log}")
        numbers[process.role] = number = numbers.get(process.role, 0) + 1
        name = f"{process.role} {number}"
        family = with_children(process.pid)
        figures[f"{name}: KB resident"] = sum(map(resident_kb, family))
        figures[f"{name}: open files"] = sum(map(open_files, family))
    figures["storage: files"] = sum(len(files) for _, _, files in os.walk(cluster.storage))
    return figures


def count_streams(client: Redis) -> int:
    """Return the number of streams without rq's results, which it deletes 300 s after their chores."""
    return sum(not key.startswith("rq:") for key in client.scan_iter(count=1000, _type="stream"))


def with_children(pid: int) -> list[int]:
    """Return a process and its child processes, such as those of the chores."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *map(int, children)]


def resident_kb(pid: int) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0])


def open_files(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
