"""`python -m chaos.launch`: starts the processes of a stack by forks of one process that has imported everything.

A worker so starts in a few ms instead of a second. One request per line on stdin, one reply per line on stdout, both
JSON: `{"start": role, "env": {...}, "log": path}` -> `{"pid": n}`; `{"poll": pid}` -> `{"status": n or null}`. All
processes end with it, and it ends with its stdin.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from typing import Any

from shared.runtime.parent_process import end_with_parent

PORT = "CHAOS_PORT"


def _run(role: str) -> int:
    """Run one process of the product with the harness' engine, hooks and planted bugs."""
    from chaos import hooks, planted_bugs

    hooks.install()
    if bug := os.environ.get(planted_bugs.BUG):
        planted_bugs.plant(bug)
    if role == "api":
        import api.__main__

        return api.__main__.main(["--port", os.environ[PORT]])
    if role == "chores":
        import worker.chores.__main__

        return worker.chores.__main__.main()
    import worker.__main__
    from chaos.sleeping_engine import StubEngine

    return worker.__main__.main(lambda _: StubEngine)


def _child(role: str, env: dict[str, str], log: str) -> None:
    status = 1
    try:
        end_with_parent(os.getppid())
        os.setsid()
        os.environ.clear()
        os.environ.update(env)
        out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        status = _run(role)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _reply(request: dict[str, Any]) -> dict[str, Any]:
    if "poll" in request:
        pid, status = os.waitpid(request["poll"], os.WNOHANG)
        return {"status": os.waitstatus_to_exitcode(status) if pid else None}
    if not (pid := os.fork()):
        _child(request["start"], request["env"], request["log"])
    return {"pid": pid}


def main() -> None:
    for module in (
        "api.__main__",
        "worker.__main__",
        "worker.worker",
        "worker.chores.__main__",
        "chaos.sleeping_engine",
    ):
        with contextlib.suppress(ImportError):
            __import__(module)
    replies = os.fdopen(os.dup(1), "w")
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        print(json.dumps(_reply(json.loads(line))), file=replies, flush=True)


if __name__ == "__main__":
    main()
