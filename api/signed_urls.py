"""URLs of pictures that need no key for a while: what a browser shows, and a client hands on."""

from __future__ import annotations

import hashlib
import hmac

from shared.errors import UrlRefused

_MAX_EXPIRES = 10**11


class Signer:
    """Signs with a secret of the namespace, so that every API process knows the URLs of all."""

    def __init__(self, secret: bytes, lives_s: int) -> None:
        self._secret = secret
        self._lives_s = lives_s

    def query(self, job_id: str, index: int, now_ms: int) -> str:
        """Return what to append to a picture's URL. It is good for once to twice the set life.

        The end is the same for all that is signed within one life, so that an answer does not change at every poll.
        """
        expires = (now_ms // 1000 // self._lives_s + 2) * self._lives_s
        return f"?expires={expires}&signature={self._signature(job_id, index, expires)}"

    def check(self, job_id: str, index: int, *, expires: int, signature: str, now_ms: int) -> None:
        """Raise `UrlRefused` unless this was signed by us for this picture and has not expired."""
        told = self._signature(job_id, index, expires) if 0 <= expires < _MAX_EXPIRES else ""
        if not hmac.compare_digest(told.encode(), signature.encode("utf-8", "replace")):
            raise UrlRefused("the URL's signature does not fit; take the URL from the job again", param="signature")
        if expires * 1000 <= now_ms:
            raise UrlRefused("the URL has expired; take it from the job again", param="expires")

    def _signature(self, job_id: str, index: int, expires: int) -> str:
        signed = f"artifact\n{job_id}\n{index}\n{expires}".encode()
        return hmac.new(self._secret, signed, hashlib.sha256).hexdigest()
