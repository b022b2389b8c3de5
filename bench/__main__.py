"""`python -m bench`: every benchmark that needs no server, one after the other."""

from __future__ import annotations

from bench import engine, simulate

if __name__ == "__main__":
    simulate.main()
    print(flush=True)
    engine.main()
