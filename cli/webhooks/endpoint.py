"""The endpoint of `fusequeue webhooks listen`, which the service deletes if the command cannot."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from fusequeue import Client, ClientError, EndpointEventName, NotFound, Unauthorized, WebhookEndpoint

DESCRIPTION = "fusequeue webhooks listen"
EXPIRES_S = 300
"""After which the service deletes the endpoint of a command that was killed, or whose key has ended."""

RENEW_S = 30.0


class OwnEndpoint:
    """An endpoint for the time of the command. `renew` keeps it, and makes it again after an outage.

    `on_made` gets each endpoint with its secret.
    """

    def __init__(
        self,
        client: Client,
        url: str,
        events: list[EndpointEventName] | None,
        on_made: Callable[[WebhookEndpoint], None],
    ) -> None:
        self._client = client
        self._url = url
        self._events = events
        self._on_made = on_made
        self._ended = threading.Event()
        for left in client.webhooks.list():  # of a command that was killed
            if (left.url, left.description) == (url, DESCRIPTION):
                client.webhooks.delete(left)
        self.current = self._make()

    def _make(self) -> WebhookEndpoint:
        made = self._client.webhooks.create(
            self._url, events=self._events, description=DESCRIPTION, expires_s=EXPIRES_S
        )
        self._on_made(made)
        return made

    def renew(self, on_refused: Callable[[Unauthorized], None]) -> None:
        """Renew the endpoint until `end`; a refusal of the key ends it, and is reported. An outage is waited out."""
        while not self._ended.wait(RENEW_S):
            try:
                with suppress(NotFound):
                    self._client.webhooks.update(self.current, expires_s=EXPIRES_S)
                    continue
                self.current = self._make()
            except Unauthorized as error:
                on_refused(error)
                return
            except ClientError:
                continue

    def end(self) -> None:
        """Delete the endpoint; one that a key which has ended cannot delete expires."""
        self._ended.set()
        with suppress(NotFound, Unauthorized):
            self._client.webhooks.delete(self.current)
