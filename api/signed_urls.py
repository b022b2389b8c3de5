"""Signed URLs of artifacts, which need no key for a while: for browsers, and for clients to share."""

from __future__ import annotations

import hashlib
import hmac

from shared.errors import UrlRefused

_MAX_EXPIRES = 10**11


class Signer:
    """Signs with the secret of a namespace, which all of its API processes share."""

    def __init__(self, secret: bytes, lifetime_s: int) -> None:
        self._secret = secret
        self._lifetime_s = lifetime_s

    def query(self, job_id: str, index: int, now_ms: int) -> str:
        """Return the query to append to an artifact's URL, valid for one to two lifetimes.

        All URLs signed within one lifetime expire together, so that a response stays the same between polls.
        """
        expires = (now_ms // 1000 // self._lifetime_s + 2) * self._lifetime_s
        return f"?expires={expires}&signature={self._signature(job_id, index, expires)}"

    def check(self, job_id: str, index: int, *, expires: int, signature: str, now_ms: int) -> None:
        """Raise `UrlRefused` unless the signature is valid for this artifact and has not expired."""
        expected = self._signature(job_id, index, expires) if 0 <= expires < _MAX_EXPIRES else ""
        if not hmac.compare_digest(expected.encode(), signature.encode("utf-8", "replace")):
            raise UrlRefused("the URL's signature is not valid; read the URL from the job again", param="signature")
        if expires * 1000 <= now_ms:
            raise UrlRefused("the URL has expired; read it from the job again", param="expires")

    def _signature(self, job_id: str, index: int, expires: int) -> str:
        signed = f"artifact\n{job_id}\n{index}\n{expires}".encode()
        return hmac.new(self._secret, signed, hashlib.sha256).hexdigest()
