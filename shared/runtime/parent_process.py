"""Child processes that end with their parent, also when it is killed.

`python -m shared.runtime.parent_process PARENT SIGNAL COMMAND...` is the parent watch: it becomes COMMAND, which
receives SIGNAL when process PARENT dies. Only Linux supports this; elsewhere COMMAND runs without it. It starts with
every process of `fusequeue up`, so this module imports little.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def end_with_parent(parent: int, signal_number: int = signal.SIGKILL) -> None:
    """Let the kernel send `signal_number` to this process when `parent` dies; exit now if it has died already.

    Execve keeps the setting, a fork does not. Only Linux supports it: elsewhere nothing happens.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0)
        if os.getppid() != parent:
            sys.exit(1)  # it died before prctl: no signal would come


def watch_parent(parent: int, signal_number: int, command: list[str]) -> None:
    """Become `command`, which receives `signal_number` when `parent` dies."""
    end_with_parent(parent, signal_number)
    os.execvp(command[0], command)


if __name__ == "__main__":
    watch_parent(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
