"""Options of `submit` and `backfill`: they follow from the declared fields of jobs."""

from __future__ import annotations

from typing import Any

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from cli.client_options import Chosen, takes
from cli.help_texts import Command
from cli.job_options import BY_HAND, SECTIONS, TEXTS, chosen_fields, job_options
from cli.main import load

OF_OBJECTS = {"scheduler_options", "metadata", "extra", "best_of"}
FIELDS = {name: field for declared in SECTIONS for name, field in declared.model_fields.items()}
ONE, TWO = "job_01ja3v5c8zq3m7x2r4t6w8y0ab", "job_01ja3v5c8zq3m7x2r4t6w8y0ac"
LEFT_OUT = {"submit": set[str](), "backfill": {"batch_id", "group"}}


def options_of(command: str) -> dict[str, Any]:
    return {option.name: option for option in load(command).params if option.param_type_name == "option"}


@pytest.mark.parametrize("command", LEFT_OUT)
def test_each_field_of_one_value_has_an_option_with_its_text(command: str) -> None:
    options = options_of(command)
    expected = FIELDS.keys() - BY_HAND - OF_OBJECTS - LEFT_OUT[command]
    assert expected | {"size"} <= options.keys()
    assert {name: options[name].help for name in expected} == {
        name: FIELDS[name].description for name in expected
    } | TEXTS


def given(*arguments: str) -> tuple[Result, Chosen]:
    """Return the result of a command with the options of jobs, and the fields that it gets."""
    found: Chosen = {}
    app = typer.Typer(add_completion=False, rich_markup_mode=None)

    @app.command(cls=Command)
    @takes(job_options())
    def command(chosen: Chosen) -> None:
        found.update(chosen_fields(chosen))

    return CliRunner().invoke(app, arguments), found


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        ("", {}),
        ("--negative= --seed -1 -n 2", {"negative_prompt": "", "seed": -1, "n": 2}),
        ("--size 96x64 --guidance 3", {"width": 96, "height": 64, "guidance_scale": 3.0}),
        ("--seed 9223372036854775807 --mask-blur 0", {"seed": 2**63 - 1, "mask_blur": 0}),
        ("--no-keep-unmasked --reproducible", {"keep_unmasked": False, "reproducible": True}),
        ("--deadline 0.5 --on-deadline run --batch a-1", {"deadline_s": 0.5, "on_deadline": "run", "batch_id": "a-1"}),
        ("--not-before 2099-01-31T22:00:00+01:00", {"not_before": "2099-01-31T22:00:00+01:00"}),
        ("--not-before 1h30m", {"not_before": 5400}),
        ("--not-before 0.5", {"not_before": 0.5}),
        (f"--after {ONE} --after {TWO}", {"after": [ONE, TWO]}),
        ("--scheduler euler_a --step-cache off", {"scheduler": "euler_a", "step_cache": "off"}),
        (
            "--task edit --output-format webp --priority bulk",
            {"task": "edit", "output_format": "webp", "priority": "bulk"},
        ),
    ],
)
def test_options_become_the_fields_of_the_request(arguments: str, fields: dict[str, Any]) -> None:
    result, found = given(*arguments.split())
    assert result.exit_code == 0, result.stderr
    assert found == fields
    assert {name: type(value) for name, value in found.items()} == {name: type(fields[name]) for name in fields}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--seed", "-2"),
        ("--after", "nightly"),
        ("--seed", "9223372036854775808"),
        ("-n", "2147483648"),
        ("--fps", "121"),
        ("--strength", "0"),
        ("--guidance", "nan"),
        ("--guidance-scale-2", "inf"),
        ("--deadline", "0"),
        ("--not-before", "tomorrow"),
        ("--not-before", "31d"),
        ("--not-before", "true"),
        ("--clip-skip", "12"),
        ("--mask-padding", "1.5"),
        ("--priority", "high"),
        ("--task", "paint"),
        ("--step-cache", "none"),
        ("--scheduler", "x" * 65),
        ("--scheduler", ""),
        ("--prompt-2", ""),
        ("--webhook", "caf\udce9"),
        ("--batch", "a b"),
        ("--size", "1x"),
    ],
)
def test_a_value_that_the_field_cannot_have_names_the_option(option: str, value: str) -> None:
    result, _ = given(option, value)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"Invalid value for '{option}': " in result.stderr


def test_help_lists_options_by_section_with_those_of_the_command_last() -> None:
    shown = given("--help")[0].stdout
    heads = [line for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert heads == ["Image, video or sound:", "For some models:", "Job:", "Options:"]
    image, _, rest = shown.partition("For some models:")
    assert ("--seed" in image, "--seed" in rest, "--clip-skip" in rest, "--help" in image) == (True, False, True, False)
