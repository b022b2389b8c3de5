"""`python -m bench`: all benchmarks in turn."""

from __future__ import annotations

from bench import engine, fleet, interactive, over_http, pool, preempt, simulate, swaps

if __name__ == "__main__":
    simulate.main([])
    print(flush=True)
    swaps.main([])
    print(flush=True)
    fleet.main([])
    print(flush=True)
    engine.main([])
    print(flush=True)
    preempt.main([])
    print(flush=True)
    interactive.main([])
    print(flush=True)
    over_http.main([])
    print(flush=True)
    pool.main([])
