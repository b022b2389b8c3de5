"""`python -m bench.syncs`: see `table`."""

from bench.syncs.table import main

if __name__ == "__main__":
    main()
