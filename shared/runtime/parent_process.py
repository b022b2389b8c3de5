"""Child processes that end with their parent, also when it is killed."""

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
