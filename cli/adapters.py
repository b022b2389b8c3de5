"""`fusequeue adapters`: list, upload, show and delete LoRA adapters and embeddings."""

from pathlib import Path
from typing import Annotated

import typer

from cli.client_options import Json, Key, Url, connected, finite_option, for_each, name_option, text_option
from cli.jobs import Limit
from fusequeue import UploadedAdapter

adapters = typer.Typer(invoke_without_command=True)

COLUMNS = ("id", "model", "scale", "bytes", "created", "name")

AdapterId = Annotated[str, typer.Argument(help="Adapter id.", callback=name_option)]
AdapterIds = Annotated[list[str], typer.Argument(help="Adapter ids.", callback=name_option)]
Scale = Annotated[float | None, typer.Option(help="Weight in jobs that set none. Default: 1.", callback=finite_option)]
MaxScale = Annotated[float | None, typer.Option(help="Largest weight of a job. Default: 2.", callback=finite_option)]


@adapters.callback()
def list_adapters(
    context: typer.Context, limit: Limit = 20, url: Url = None, api_key: Key = None, as_json: Json = False
) -> None:
    """List uploaded LoRA adapters and embeddings, newest first; upload, show and delete them."""
    if context.invoked_subcommand is None:
        with connected(url, api_key, as_json) as (client, console):
            console.table(client.adapters.list(limit=limit), COLUMNS, _row)


@adapters.command()
def create(
    file: Annotated[
        Path,
        typer.Argument(exists=True, dir_okay=False, help="A safetensors file of LoRA weights, or of an embedding."),
    ],
    model: Annotated[str, typer.Option(help="A model listed by `fusequeue models`.", callback=text_option)] = "demo",
    name: Annotated[str | None, typer.Option(help="Default: that of the file.", callback=text_option)] = None,
    scale: Scale = None,
    max_scale: MaxScale = None,
    component: Annotated[
        str | None, typer.Option(help="`transformer_2`: the second denoiser.", callback=text_option)
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(help="Of an embedding: its word in prompts. Default: the file's.", callback=text_option),
    ] = None,
    url: Url = None,
    api_key: Key = None,
    as_json: Json = False,
) -> None:
    """Upload an adapter and print its id, which jobs of its model name in `adapters`."""
    with connected(url, api_key, as_json) as (client, console):
        made = client.adapters.create(
            model, file, name=name, scale=scale, max_scale=max_scale, component=component, token=token
        )
        console.record(made, _lines(made))


@adapters.command()
def show(adapter: AdapterId, url: Url = None, api_key: Key = None, as_json: Json = False) -> None:
    """Show an adapter."""
    with connected(url, api_key, as_json) as (client, console):
        found = client.adapters.get(adapter)
        console.record(found, _lines(found))


@adapters.command()
def delete(adapter: AdapterIds, url: Url = None, api_key: Key = None, as_json: Json = False) -> None:
    """Delete adapters; refused while a job that has not ended uses one."""
    with connected(url, api_key, as_json) as (client, console):

        def remove(adapter_id: str) -> None:
            client.adapters.delete(adapter_id)
            console.record({"id": adapter_id, "deleted": True}, ((adapter_id, "deleted"),))

        for_each(adapter, remove)


def _lines(adapter: UploadedAdapter) -> tuple[tuple[str, object], ...]:
    return (
        ("id", adapter.id),
        ("name", adapter.name),
        ("model", adapter.model),
        ("scale", f"{adapter.scale:g}, at most {adapter.max_scale:g}")
        if adapter.token is None
        else ("token", adapter.token),
        ("bytes", adapter.bytes),
        ("created", f"{adapter.created_at:%Y-%m-%d %H:%M:%S}"),
        *(() if adapter.source is None else (("source", adapter.source),)),
    )


def _row(adapter: UploadedAdapter) -> tuple[object, ...]:
    at = f"{adapter.created_at:%Y-%m-%d %H:%M:%S}"
    return adapter.id, adapter.model, f"{adapter.scale:g}", adapter.bytes, at, adapter.name
