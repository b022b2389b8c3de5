"""A lock on a folder that one process uses at a time."""

import fcntl
import os
from pathlib import Path
from typing import TextIO

from shared.errors import ConfigurationError


def lock(path: Path, option: str) -> TextIO:
    """Lock the folder of the file `path` until the returned file is closed.

    Raises `ConfigurationError`, which names the `option` to change, while another process holds the lock.
    """
    # Append mode: a second process must not erase the holder's process id.
    file = path.open("a+", encoding="ascii")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
    except BaseException as error:
        file.seek(0)
        holder = file.read().strip()
        file.close()
        if isinstance(error, BlockingIOError):
            message = f"{path.parent} is in use by process {holder}; stop it, or choose another {option}"
            raise ConfigurationError(message) from None
        raise
    return file
