"""`python -m bench.fleet`: see `simulation`."""

from bench.fleet.simulation import main

if __name__ == "__main__":
    main()
