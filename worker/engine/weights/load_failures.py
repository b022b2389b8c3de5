"""Failed loads: whether to fail the jobs or to repeat the load, and when."""

import errno
import math
import re
import ssl
from collections.abc import Iterator
from pathlib import Path

import torch

from shared.runtime.backoff import backoff_s
from worker.engine.errors import is_out_of_memory

# Of the statuses that blame the request, those that pass by themselves: a proxy's login, timeouts, locks, rate limits.
_PASSING_STATUSES = (407, 408, 409, 421, 423, 425, 429)
# OSErrors that a model's files are at fault for; all others concern the disk, the network or the machine.
_FILES_AT_FAULT = frozenset(
    (
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.EACCES,
        errno.EPERM,
        errno.EINVAL,
        errno.ENAMETOOLONG,
        errno.ELOOP,
    )
)
_NETWORK_LIBRARIES = frozenset(("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3"))
_RUST_ERRNO = re.compile(r"\(os error (\d+)\)")  # in messages of safetensors, tokenizers and hf_xet
LONGEST_DELAY_FAILURES = 7  # the delay doubles up to then


def passing_cause(error: BaseException, *, downloading: bool = False) -> BaseException | None:
    """Return what will pass without a change of the model: a fault of network, disk or memory. None: it will not.

    The first of the error and its causes that decides does so. While `downloading`, undecided errors of the system or
    of a library's native code count as passing: a file that arrived in part has no errno.
    """
    chain = list(with_causes(error))
    for one in chain:
        passes = _passes(one)
        if passes is not None:
            return one if passes else None
    undecided = (one for one in chain if downloading and isinstance(one, OSError | RuntimeError))
    return next(undecided, None)


def retry_delay_s(failures: int, first_s: float, jitter: float) -> float:
    """Return for how long to wait after the last of `failures` failures in a row; `jitter` is from 0 to 1."""
    return backoff_s(min(failures, LONGEST_DELAY_FAILURES), first_s, math.inf) * (0.75 + 0.5 * jitter)


def is_unmounted(folder: Path) -> bool:
    """Return whether the file system of a model's folder seems not to be mounted: nothing is there, nor beside it."""
    place = folder if folder.exists() else folder.parent
    return not place.exists() or (place.is_dir() and not any(place.iterdir()))


def with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what it was raised from, or while handling."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or (None if following.__suppress_context__ else following.__context__)


def _passes(error: BaseException) -> bool | None:
    """Return whether a single error will pass, None if it does not decide."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int):
        return status >= 500 or status in _PASSING_STATUSES
    if type(error).__name__ == "OfflineModeIsEnabled":
        return False  # a setting of the operator, although it is a ConnectionError
    if is_out_of_memory(error) or isinstance(error, torch.AcceleratorError):
        return True
    if isinstance(error, ConnectionError | TimeoutError | ssl.SSLError):
        return True
    if type(error).__module__.partition(".")[0] in _NETWORK_LIBRARIES or type(error).__name__ == "FileMetadataError":
        return True
    number = _errno(error)
    return None if number is None else number not in _FILES_AT_FAULT


def _errno(error: BaseException) -> int | None:
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    found = _RUST_ERRNO.search(str(error))
    return int(found[1]) if found else None
