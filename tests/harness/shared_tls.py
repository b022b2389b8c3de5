"""One default TLS context for all httpx clients of the tests: loading its certificates takes 36 ms of CPU time."""

from __future__ import annotations

import functools
import os
import ssl
from typing import Any

import httpx._transports.default as transports

_create: Any = transports.create_ssl_context


@functools.cache
def _default(_variables: tuple[str | None, ...], trust_env: bool) -> ssl.SSLContext:
    context: ssl.SSLContext = _create(True, None, trust_env)
    return context


def _shared(verify: Any = True, cert: Any = None, trust_env: bool = True) -> ssl.SSLContext:
    if verify is True and cert is None:
        return _default((os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")), trust_env)
    context: ssl.SSLContext = _create(verify, cert, trust_env)
    return context


def install() -> None:
    """Let clients that name no certificates share a context from now on."""
    transports.create_ssl_context = _shared
