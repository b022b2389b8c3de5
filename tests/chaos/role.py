"""`python -m chaos.role ROLE`: one process of the product with the harness' engine, hooks and planted bugs."""

from __future__ import annotations

import os
import sys

from chaos import hooks, planted_bugs
from shared.runtime.parent_process import end_with_parent

PORT = "CHAOS_PORT"


def main(role: str) -> int:
    """Return the exit status of the API, the chores or a worker."""
    hooks.install()
    if bug := os.environ.get(planted_bugs.BUG):
        planted_bugs.plant(bug)
    if role == "api":
        import api.__main__

        return api.__main__.main(["--port", os.environ[PORT]])
    if role == "chores":
        import api.chores.__main__

        return api.chores.__main__.main()
    import worker.__main__
    from chaos.sleeping_engine import StubEngine

    return worker.__main__.main(lambda _: StubEngine)


if __name__ == "__main__":
    end_with_parent(os.getppid())
    sys.exit(main(sys.argv[1]))
