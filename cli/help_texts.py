"""How commands read their arguments and show their help: sections of options, kinds of values in plain words."""

import re
from collections.abc import Mapping
from typing import Any

from typer.core import TyperCommand, TyperGroup

_KINDS: Mapping[str, str] = {
    "str": "text",
    "list[str]": "text",
    "int": "number",
    "int range": "number",
    "float": "number",
    "float range": "number",
    "list[Path]": "file",
    "dir": "folder",
}
"""Words for the kinds of values, by how typer calls them."""

_KIND = re.compile(rf"<({'|'.join(map(re.escape, _KINDS))})>")


def plain_kinds(names: str) -> str:
    """Return the names of a parameter with the kind of its value in plain words: `--seed <number>`."""
    return _KIND.sub(lambda found: f"<{_KINDS[found[1]]}>", names)


def is_given(context: Any, parameter: str) -> bool:
    """Return whether a parameter of the command is on the command line, and no default."""
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


class Command(TyperCommand):
    """A command that lists its options by the sections that they name; those without one are last."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            is_argument = parameter.param_type_name == "argument"
            section = "Arguments" if is_argument else getattr(parameter, "rich_help_panel", None) or "Options"
            if record := parameter.get_help_record(ctx):
                names, text = record
                sections.setdefault(section, []).append((plain_kinds(names), text))
        for section in sorted(sections, key=lambda name: name == "Options"):
            with formatter.section(section):
                formatter.write_dl(sections[section])


class CommandGroup(TyperGroup):
    """A command with commands of its own, each listed with the whole first paragraph of its help.

    One that does something alone lists objects: `list` after it is the same.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        lists = self.invoke_without_command and args[:1] == ["list"]
        return super().parse_args(ctx, args[1:] if lists else args)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        found = super().resolve_command(ctx, args)
        for parameter in self.params:
            if is_given(ctx, parameter.name):
                ctx.fail(f"{parameter.opts[0]} is for the list: an option of `{args[0]}` goes after it.")
        return found

    def format_options(self, ctx: Any, formatter: Any) -> None:
        records = [record for parameter in self.get_params(ctx) if (record := parameter.get_help_record(ctx))]
        with formatter.section("Options"):
            formatter.write_dl([(plain_kinds(names), text) for names, text in records])
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, _first_paragraph(command.help)) for name, command in self.commands.items()])


def _first_paragraph(text: str | None) -> str:
    return " ".join((text or "").split("\n\n")[0].split())
