"""`python -m cli.up.parent_watch PARENT SIGNAL COMMAND...`: become COMMAND, which gets SIGNAL when PARENT is gone.

Only Linux can tell a process that its parent died; elsewhere the command runs without that promise.
"""

from __future__ import annotations

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>; kept over execve


def main(arguments: list[str]) -> None:
    """Bind this process's life to its parent's, then become the command."""
    parent, signal_number, *command = arguments
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0)
        if os.getppid() != int(parent):
            # It died before the bond was made: no signal will come.
            sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
