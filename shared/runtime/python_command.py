"""The command of a Python process that this program starts."""

import sys


def python_command(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs `module` with `arguments`, by this interpreter and of this installation.

    -P: without it, `python -m` imports from the current folder first, which can hold a user's own `worker.py`.
    """
    return (sys.executable, "-P", "-m", module, *arguments)
