"""The errors of the Redis client, as those of the queue."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    MovedError,
    NoPermissionError,
    RedisError,
    ResponseError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError

from shared.errors import RedisFull, RedisUnavailable, ScriptFailed

REFUSED_WHEN_FULL = "command not allowed when used memory > 'maxmemory'"
"""Text of Redis' refusal at `maxmemory`: an error of its own for a command, part of an error's text for a script."""

_SERVER_STATES = re.compile(r"READONLY|MASTERDOWN|LOADING|MISCONF|NOREPLICAS|CLUSTERDOWN|UNBLOCKED|NOPERM|NOAUTH|OOM")
"""Errors of a command in a script that a later call does not get."""


@contextmanager
def translated() -> Iterator[None]:
    """Convert all errors of the Redis client to `RedisUnavailable`."""
    try:
        yield
    except (RedisError, OSError, TimeoutError) as error:
        if REFUSED_WHEN_FULL in str(error):
            raise RedisFull("Redis has no memory left; retry later, or raise its maxmemory") from error
        if _is_fault_of_script(error):
            raise ScriptFailed(f"a script of the queue failed: {error!s}") from error
        if isinstance(error, AskError) and not isinstance(error, MovedError):
            raise RedisUnavailable("cannot use Redis: its cluster is moving this namespace's slot") from error
        raise RedisUnavailable(f"cannot reach Redis: {str(error).rstrip('.')}", public=_public(error)) from error


def _is_fault_of_script(error: Exception) -> bool:
    """Return whether a script itself raised the error, not a command in it that the server's state refuses."""
    text = str(error)
    return isinstance(error, ResponseError) and "user_script" in text and not _SERVER_STATES.search(text)


def _public(error: Exception) -> str | None:
    """Return the kind of fault, without the address that the error's text can contain."""
    if isinstance(error, AuthenticationError | NoPermissionError):
        return "redis: access denied"
    if isinstance(error, BusyLoadingError):
        return "redis: still loads its data"
    if isinstance(error, TimeoutError | RedisTimeoutError):
        return "redis: no response in time"
    return "redis: responds with an error" if isinstance(error, ResponseError) else None
