"""`python -m bench`: all benchmarks in turn."""

from __future__ import annotations

from bench import engine, fleet, interactive, over_http, pool, preempt, simulate, swaps

if __name__ == "__main__":
    for benchmark in (simulate, swaps, fleet, engine, preempt, interactive, over_http, pool):
        benchmark.main([])
        print(flush=True)
