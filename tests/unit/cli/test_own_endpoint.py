"""The endpoint of `fusequeue webhooks listen`: renewed, made again, and given up with its key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
from harness.waiting import wait_until

from cli.webhooks import endpoint as module
from cli.webhooks.command import kept_endpoint
from cli.webhooks.endpoint import DESCRIPTION, EXPIRES_S, OwnEndpoint
from cli.webhooks.receiver import Receiver
from fusequeue import Client, ClientError, NotFound, Unauthorized, Unreachable, WebhookEndpoint

URL = "http://127.0.0.1:8200/"


class FakeWebhooks:
    """Endpoints of a service, whose next renewals raise `faults`; once the key is refused, so is all else."""

    def __init__(self) -> None:
        self.stored: dict[str, WebhookEndpoint] = {}
        self.renewed: list[str] = []
        self.faults: list[ClientError] = []
        self.has_ended = False
        self.made = 0

    def list(self) -> list[WebhookEndpoint]:
        return [*self.stored.values()]

    def create(self, url: str, *, events: Any, description: str, expires_s: int) -> WebhookEndpoint:
        assert expires_s == EXPIRES_S
        self.made += 1
        made = {"id": f"we_{self.made}", "url": url, "events": events or [], "created_at": 0, "secret": "whsec_1"}
        self.stored[f"we_{self.made}"] = WebhookEndpoint.model_validate({**made, "description": description})
        return self.stored[f"we_{self.made}"]

    def update(self, endpoint: WebhookEndpoint, *, expires_s: int) -> None:
        assert expires_s == EXPIRES_S
        if self.faults:
            fault = self.faults.pop(0)
            self.has_ended = isinstance(fault, Unauthorized)
            raise fault
        self.renewed.append(endpoint.id)

    def delete(self, endpoint: WebhookEndpoint) -> None:
        if self.has_ended:
            raise refusal(Unauthorized, 401, "invalid_api_key")
        del self.stored[endpoint.id]

    @property
    def client(self) -> Client:
        class Service:
            webhooks = self

        return cast(Client, Service())


def refusal(kind: type[Any], status: int, code: str) -> ClientError:
    return cast(ClientError, kind("refused", status=status, code=code))


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> FakeWebhooks:
    monkeypatch.setattr(module, "RENEW_S", 0.01)
    return FakeWebhooks()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver(0, lambda _: None, lambda _: None) as found:
        yield found


def test_an_endpoint_is_renewed_until_the_command_ends_and_is_deleted_then(
    service: FakeWebhooks, receiver: Receiver
) -> None:
    """What a killed command has left at the same URL is deleted first; an outage is waited out."""
    left = service.create(URL, events=None, description=DESCRIPTION, expires_s=EXPIRES_S)
    other = service.create("https://example.com/hook", events=None, description="", expires_s=EXPIRES_S)
    service.faults = [Unreachable("the service restarts")]
    made: list[str] = []
    with kept_endpoint(OwnEndpoint(service.client, URL, None, lambda one: made.append(one.id)), receiver):
        wait_until(lambda: len(service.renewed) > 1, "the endpoint is renewed")
        assert left.id not in service.stored
    assert (set(service.renewed), made) == ({"we_3"}, ["we_3"])
    assert list(service.stored) == [other.id]


def test_an_endpoint_that_has_expired_in_an_outage_is_made_again(service: FakeWebhooks, receiver: Receiver) -> None:
    service.faults = [refusal(NotFound, 404, "not_found")]
    made: list[str] = []
    with kept_endpoint(OwnEndpoint(service.client, URL, None, lambda one: made.append(one.id)), receiver):
        wait_until(lambda: "we_2" in service.renewed, "the new endpoint is renewed")
    assert made == ["we_1", "we_2"]


def test_a_command_whose_key_is_refused_ends_and_says_when_its_endpoint_does(
    service: FakeWebhooks, receiver: Receiver, capsys: pytest.CaptureFixture[str]
) -> None:
    service.faults = [refusal(Unauthorized, 401, "invalid_api_key")]
    with (
        pytest.raises(Unauthorized),
        kept_endpoint(OwnEndpoint(service.client, URL, None, lambda _: None), receiver),
    ):
        receiver.serve_forever(poll_interval=0.01)
    assert "refuses the API key now, and deletes the endpoint within 300 s" in capsys.readouterr().err
