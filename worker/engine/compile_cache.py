"""The folder of compiled code, which torch makes when it is imported."""

import os
import tempfile
from collections.abc import MutableMapping

CACHE_DIR = "TORCHINDUCTOR_CACHE_DIR"


def leave_unusable_cache(environ: MutableMapping[str, str]) -> str | None:
    """Unset the folder of compiled code if nothing can be written to it, as on a read-only volume; return the reason.

    Torch then uses a folder in that of temporary files.
    """
    folder = environ.get(CACHE_DIR)
    if not folder:
        return None
    try:
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        del environ[CACHE_DIR]
        return f"{CACHE_DIR}={folder}: {error.strerror}; compiled code is lost at the end: set it to a writable folder"
    return None
