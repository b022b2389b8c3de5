"""`fusequeue generate`: images of prompts with an engine in this process, without a service."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.client_options import Chosen, Exit, exit_on_error, takes, text_option
from cli.job_options import Fields, chosen_fields, job_options, parse_fields, require_one_value
from cli.messages import print_error
from cli.worker_packages import require_worker_packages
from fusequeue.result_files import check_folder
from shared.errors import FusequeueError

Prompts = Annotated[
    list[str],
    typer.Argument(help="What the images show; - reads a prompt from each line of the input.", callback=text_option),
]
Model = Annotated[
    str,
    typer.Option(help="A folder, an id of the hub, or an entry of the models file.", callback=text_option),
]
Folder = Annotated[Path, typer.Option("--out", "-o", file_okay=False, help="Folder for the images.")]
Image = Annotated[
    list[Path] | None,
    typer.Option(exists=True, dir_okay=False, help="Image to start from or to edit; repeat it for several."),
]
Mask = Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Mask: white is repainted.")]
MaxBatch = Annotated[int, typer.Option(min=1, max=256, help="Most images of a forward.")]
Dtype = Annotated[str | None, typer.Option(help="float32, float16 or bfloat16. Default: that of the models file.")]
Device = Annotated[str | None, typer.Option(help="cuda, cuda:N or cpu.", callback=text_option)]

_NUMBERED = re.compile(r"(\d{5,9})-\d+\.\w+")
_OF_THE_SERVICE = (
    *("priority", "deadline_s", "on_deadline", "not_before", "after", "on_parent_failure"),
    *("batch_id", "group", "webhook", "task"),
)


@takes(job_options(_OF_THE_SERVICE))
def generate(
    prompts: Prompts,
    chosen: Chosen,
    model: Model,
    out: Folder = Path("."),
    image: Image = None,
    mask: Mask = None,
    field: Fields = None,
    max_batch: MaxBatch = 8,
    dtype: Dtype = None,
    device: Device = None,
) -> None:
    """Make images of prompts here, without a service, and save them beside those that the folder has."""
    fields, assigned = chosen_fields(chosen), parse_fields(field or [])
    if image:
        fields |= {"image": image[0]} if len(image) == 1 else {"images": image}
    if mask is not None:
        fields["mask"] = mask
    require_one_value(assigned, fields)
    fields |= assigned
    options = {"max_batch": max_batch} | ({} if dtype is None else {"dtype": dtype})
    try:
        require_worker_packages()
        with exit_on_error():
            check_folder(out)  # before a model is loaded
            failed = _generate(_texts(prompts), fields, model, out, device, options)
    except FusequeueError as error:
        print_error(error.message)
        raise typer.Exit(Exit.USAGE) from None
    if failed:
        raise typer.Exit(Exit.FAILED)


def _texts(prompts: list[str]) -> Iterator[str]:
    for prompt in prompts:
        if prompt == "-":
            yield from (line.strip() for line in sys.stdin if line.strip())
        else:
            yield prompt


def _first_free(folder: Path) -> int:
    """Return the number after the highest of the files of earlier runs."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return max((int(found[1]) + 1 for name in names if (found := _NUMBERED.fullmatch(name))), default=0)


def _generate(
    prompts: Iterator[str],
    fields: dict[str, Any],
    model: str,
    out: Path,
    device: str | None,
    options: dict[str, Any],
) -> int:
    """Save the images of all prompts, print their paths, and return how many prompts failed."""
    from library import Engine  # with it torch

    failed, first = 0, _first_free(out)
    with Engine(model, device=device, **options) as engine:
        for result in engine.stream(prompts, **fields):
            for warning in result.warnings:
                print_error(f"prompt {result.index}: {warning.message}")
            if result.error is not None:
                failed += 1
                print_error(f"prompt {result.index}: {result.error}")
                continue
            for path in result.save(out, f"{first + result.index:05}"):
                print(path, flush=True)
    return failed
