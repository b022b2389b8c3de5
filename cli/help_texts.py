"""The help of commands: sections of options, kinds of values in plain words, summaries in full."""

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
    """A command with commands of its own, each listed with the whole first paragraph of its help."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        if args[0] == "list" and "list" not in self.commands and self.invoke_without_command:
            ctx.fail(f"No such command 'list': `{ctx.command_path}` alone lists them.")
        return super().resolve_command(ctx, args)

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
