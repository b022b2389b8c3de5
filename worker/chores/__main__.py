"""`python -m worker.chores`: one chores worker."""

import sys

from worker.chores.main import main

if __name__ == "__main__":
    sys.exit(main())
