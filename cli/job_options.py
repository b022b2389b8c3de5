"""Options for the fields of jobs: each declared field of one value has one, with its type, bounds, choices and text."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import typer
from pydantic import BaseModel, ValidationError

from cli.backfill.prompts import parse_field
from cli.client_options import Chosen, finite_option, is_text, text_option
from shared.job_fields import (
    MAX_COUNT,
    CallFields,
    ChoosableFields,
    ConvertedFields,
    PipelineFields,
    ServiceFields,
)

IMAGE = "Image, video or sound"

SECTIONS: Mapping[type[BaseModel], str] = {
    PipelineFields: IMAGE,
    ChoosableFields: IMAGE,
    CallFields: "For some models",
    ServiceFields: "Job",
    ConvertedFields: "Job",
}
"""Where the help lists the options of each class of fields."""

SPELLINGS: Mapping[str, str] = {
    "n": "-n",
    "negative_prompt": "--negative",
    "guidance_scale": "--guidance",
    "deadline_s": "--deadline",
    "batch_id": "--batch",
}
"""Options that are not named as their fields."""

TEXTS: Mapping[str, str] = {
    "not_before": "Queue the job at this time, ISO 8601 with its zone, such as 2026-01-31T22:00:00Z, or after a delay "
    "such as 10m, 1h30m or 45 (seconds); at most 30 days from now. --deadline counts from then."
}
"""Where an option takes more than its field."""

BY_HAND = frozenset({"model", "prompt", "width", "height"})
"""Fields of parameters of the commands themselves, and of `--size`."""

TYPES: Mapping[str, Any] = {"integer": int, "number": float, "boolean": bool, "string": str, "array": list[str]}
"""By type in JSON schema, arrays of texts; fields of other types have no option."""

Fields = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="NAME=VALUE", help="Any request field, e.g. -s steps=20 -s seed=7."),
]


def job_options(left_out: Collection[str] = ()) -> dict[str, Any]:
    """Return `--size` and the options of all fields but those left out, by name; None is the default of each."""
    size = typer.Option(
        metavar="WIDTHxHEIGHT", help="Pixels, such as 512x768.", rich_help_panel=IMAGE, callback=parse_size
    )
    options = {"size": Annotated[str | None, size]}
    for declared in SECTIONS:
        options.update(_options_of(declared, {*BY_HAND, *left_out}))
    return options


def _options_of(declared: type[BaseModel], left_out: Collection[str]) -> Iterator[tuple[str, Any]]:
    schema = declared.model_json_schema()
    definitions = schema.get("$defs", {})
    for name, field in declared.model_fields.items():
        forms = schema["properties"][name].get("anyOf", [schema["properties"][name]])
        resolved = (definitions.get(form.get("$ref", "").rpartition("/")[2], form) for form in forms)
        form = next((form for form in resolved if form["type"] in TYPES), None)
        if form is not None and name not in left_out:
            yield name, _option(declared, name, form, field.description)


def _option(declared: type[BaseModel], name: str, form: Mapping[str, Any], text: str | None) -> Any:
    """Return the option of a field; `form` is the field's schema."""
    kind = Literal[tuple(form["enum"])] if "enum" in form else TYPES[form["type"]]
    words = name.replace("_", "-")
    switch = f"--{words}/--no-{words}" if kind is bool else f"--{words}"
    most = form.get("maximum", MAX_COUNT)
    option = typer.Option(
        SPELLINGS.get(name, switch),
        min=form.get("minimum", form.get("exclusiveMinimum")),
        max=most if most < MAX_COUNT else None,  # else help says 2147483647
        help=TEXTS.get(name, text),
        rich_help_panel=SECTIONS[declared],
        callback=_check(declared, name),
    )
    return Annotated[kind | None, option]


def _check(declared: type[BaseModel], name: str) -> Callable[[Any], Any]:
    """Return a function that returns a value of the field, or raises `BadParameter` as the service would refuse it."""

    def check(value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, str | list):
            text_option(value)
            if name == "not_before":
                value = parse_field(name, str(value))
        elif isinstance(value, float):
            finite_option(value)
        try:
            declared.__pydantic_validator__.validate_assignment(declared.model_construct(), name, value)
        except ValidationError as error:
            raise typer.BadParameter(error.errors()[0]["msg"].removeprefix("Value error, ")) from None
        return value

    return check


def parse_size(size: str | None) -> tuple[int, int] | None:
    """Return width and height; None without a size."""
    if size is None:
        return None
    match = re.fullmatch(r"([0-9]{1,6})x([0-9]{1,6})", size)
    if match is None:
        raise typer.BadParameter(f"{size[:80]!r} is not WIDTHxHEIGHT, such as 512x768")
    return int(match[1]), int(match[2])


def chosen_fields(chosen: Chosen) -> dict[str, Any]:
    """Return the request fields of the options that were given."""
    fields = dict(chosen)
    if "size" in fields:
        fields["width"], fields["height"] = fields.pop("size")
    return fields


def parse_fields(assignments: Sequence[str]) -> dict[str, Any]:
    """Return request fields from NAME=VALUE options."""
    fields: dict[str, Any] = {}
    faults = []
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name:
            faults.append(f"{assignment[:80]!r} is not NAME=VALUE")
        elif not is_text(assignment):
            faults.append(f"{assignment[:80]!r} is not UTF-8")
        elif name in fields:
            faults.append(f"{name[:80]} has two values; give it one")
        else:
            fields[name] = parse_field(name, text)
    if faults:
        raise typer.BadParameter("; ".join(faults), param_hint="'--set'")
    return fields


def require_one_value(assigned: Mapping[str, Any], others: Iterable[str]) -> None:
    """Raise `BadParameter` for fields of NAME=VALUE options that an argument or an option of their own sets too."""
    if twice := ", ".join(name for name in others if name in assigned):
        message = f"{twice}: an argument or another option sets it too; give each field one value"
        raise typer.BadParameter(message, param_hint="'--set'")
