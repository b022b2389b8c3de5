"""`fusequeue webhooks listen`: the events of a service on this machine."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, cast

import httpx
import typer

from cli.client_options import CommandConsole, Exit, Json, Key, Url, connected, name_option
from cli.messages import one_line, print_error
from cli.webhooks.endpoint import EXPIRES_S, OwnEndpoint
from cli.webhooks.receiver import Delivery, Forward, Receiver
from fusequeue import EndpointEventName, InvalidDelivery, Unauthorized, WebhookEndpoint

webhooks = typer.Typer(no_args_is_help=True, help="Receive the webhooks of a service on this machine, for development.")

TEST_S = 15.0
"""After which a test event that has not come is a fault of the set-up."""
_NOT_REACHED = (
    "no test event has come: do chores run (`fusequeue up` or `fusequeue chores`), and can they reach {}? Those of this"
    " machine need FUSEQUEUE_WEBHOOK_ALLOW_LOOPBACK=1 too"
)


def url_option(value: str | None) -> str | None:
    """Return an http or https URL; raises `BadParameter` for anything else."""
    if value is not None:
        with suppress(httpx.InvalidURL):
            if (url := httpx.URL(value)).scheme in ("http", "https") and url.host:
                return value
        raise typer.BadParameter(f"{value[:80]!r} is not a URL, such as http://127.0.0.1:3000/hook")
    return None


@webhooks.command()
def listen(
    forward: Annotated[
        str | None, typer.Option(help="URL of your application, which gets each event, signed.", callback=url_option)
    ] = None,
    events: Annotated[
        str | None,
        typer.Option(help="Such as job.running,job.failed. Default: those that end a job.", callback=name_option),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port of this machine; 0: a free one.")] = 8200,
    public_url: Annotated[
        str | None,
        typer.Option(help="Where a service elsewhere reaches the port, as through a tunnel.", callback=url_option),
    ] = None,
    url: Url = None,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Print the events of your tenant as they come, and forward them to your application, until Ctrl-C."""
    with connected(url, api_key, as_json) as (client, console):
        seen = threading.Event()

        def show(delivery: Delivery) -> None:
            if delivery.event.type == "webhook.test":
                seen.set()
            print_delivery(console, delivery)

        own = client.webhooks.secret().secret
        try:
            receiver = Receiver(port, show, refuse)
        except OSError as error:
            print_error(f"--port: {port}: {error.strerror}")
            raise typer.Exit(Exit.USAGE) from None
        address = public_url or f"http://127.0.0.1:{receiver.port}/"
        names = None if events is None else cast(list[EndpointEventName], events.split(","))  # the service checks them

        def use(made: WebhookEndpoint) -> None:
            receiver.secrets = [one for one in (made.secret, own) if one]

        with receiver, kept_endpoint(OwnEndpoint(client, address, names, use), receiver) as endpoint:
            console.err.print(f"receiving at {address}; Ctrl-C ends it", markup=False)
            if forward is not None:
                receiver.forward = Forward(forward, own)
                console.err.print(f"forwarding to {forward}, signed with {own}", markup=False)
            client.webhooks.test(endpoint.current)
            threading.Thread(target=_say_if_none_comes, args=(seen, address), daemon=True).start()
            with suppress(KeyboardInterrupt):
                receiver.serve_forever()
            seen.set()


def _say_if_none_comes(seen: threading.Event, address: str) -> None:
    if not seen.wait(TEST_S):
        print_error(_NOT_REACHED.format(address))


@contextmanager
def kept_endpoint(endpoint: OwnEndpoint, receiver: Receiver) -> Iterator[OwnEndpoint]:
    """Keep an endpoint for the time of the command; raises `Unauthorized` if its key is refused meanwhile."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    refused: list[Unauthorized] = []

    def stop(error: Unauthorized) -> None:
        refused.append(error)
        receiver.shutdown()

    threading.Thread(target=endpoint.renew, args=(stop,), daemon=True).start()
    try:
        yield endpoint
    finally:
        endpoint.end()
    for error in refused:
        print_error(f"the service refuses the API key now, and deletes the endpoint within {EXPIRES_S} s")
        raise error


def print_delivery(console: CommandConsole, delivery: Delivery) -> None:
    """Print a delivery as a line: its time, event, object, state, id, and the response of the application."""
    event, data = delivery.event, delivery.event.data
    if console.as_json:
        return console.record(
            {**event.model_dump(mode="json"), "webhook_id": delivery.id, "response": delivery.response}, ()
        )
    columns = (event.type, data.get("id") or "", data.get("status") or "", delivery.id)
    response = () if delivery.response is None else ("->", delivery.response)
    console.out.print(one_line("  ".join(map(str, (time.strftime("%H:%M:%S"), *columns, *response)))), markup=False)
    if delivery.response == 410:
        print_error("a 410 disables the endpoint: the service sends nothing more; start this command again")


def refuse(error: InvalidDelivery) -> None:
    """Print why a request is refused."""
    print_error(f"refused a request: {error}")
