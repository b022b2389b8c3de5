"""`python -m bench.engine`: see `comparison`."""

from bench.engine.comparison import main

if __name__ == "__main__":
    main()
