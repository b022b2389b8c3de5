"""`python -m bench.engine.syncs`: see `table`."""

from bench.engine.syncs.table import main

if __name__ == "__main__":
    main()
