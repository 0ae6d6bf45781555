"""Sphinx directive that generates the reference of a command from its argument parser when the pages are built.

    ```{command-reference} kvscope
    ```

writes a section per subcommand, with its description, usage, and each argument with its help. Imports our packages, but
no torch.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from kvscope_app.command_line import build_parser as desktop_parser
from kvscope_app.main import COMMANDS
from kvscope_engine.cli.main import build_parser as engine_parser

PARSERS = {"kvscope": lambda: desktop_parser(COMMANDS), "kvscope-engine": engine_parser}


class CommandReference(SphinxDirective):
    """Directive whose argument is the name of a program in `PARSERS`."""

    required_arguments = 1

    def run(self) -> Sequence[nodes.Node]:
        lines = list(reference(PARSERS[self.arguments[0]](), level=2))
        return self.parse_text_to_nodes("\n".join(lines), allow_section_headings=True)


def reference(parser: argparse.ArgumentParser, level: int) -> Iterator[str]:
    """Yield MyST Markdown for a parser and its subcommands. `level` is the level of the first heading."""
    yield f"{'#' * level} {parser.prog}\n"
    yield f"{_text(parser.description or '')}\n"
    yield f"```text\n{_usage(parser)}\n```\n"
    commands: list[argparse.ArgumentParser] = []
    for group in parser._action_groups:
        shown = [action for action in group._group_actions if action.help is not argparse.SUPPRESS]
        for action in shown:
            if isinstance(action, argparse._SubParsersAction):
                commands += dict.fromkeys(action.choices.values())
        rows = [row for action in shown for row in _row(parser, action)]
        if rows:
            yield f"**{(group.title or 'options').capitalize()}**\n"
            if group.description and group.title != "commands":
                yield f"{_text(group.description)}\n"
            yield "| argument | meaning |\n|---|---|"
            yield from rows
            yield ""
    for command in commands:
        yield from reference(command, level + 1)


def _row(parser: argparse.ArgumentParser, action: argparse.Action) -> Iterator[str]:
    if isinstance(action, argparse._SubParsersAction):
        for choice in action._choices_actions:
            yield f"| `{choice.dest}` | {_text(choice.help or '')} |"
        return
    formatter = parser._get_formatter()
    name = formatter._format_action_invocation(action).replace("|", r"\|")
    yield f"| `{name}` | {_text(formatter._expand_help(action) if action.help else '')} |"


def _usage(parser: argparse.ArgumentParser) -> str:
    positionals = [
        action for action in parser._actions if not action.option_strings and action.help is not argparse.SUPPRESS
    ]
    required = [action for action in parser._actions if action.option_strings and action.required]
    formatter: Any = parser._get_formatter()
    parts = [
        parser.prog,
        "[OPTIONS]",
        *(f"{action.option_strings[-1]} {action.metavar or action.dest.upper()}" for action in required),
    ]
    return " ".join(
        [*parts, *(formatter._format_args(action, action.metavar or action.dest) for action in positionals)]
    )


def _text(text: str) -> str:
    """Return help text as one line of escaped Markdown, with the builder's home folder replaced by `~`."""
    plain = " ".join(text.split()).replace(str(Path.home()), "~")
    return "".join(
        part if part.startswith("`") else re.sub(r"([\\|*_<>\[\]$#{}~])", r"\\\1", part)
        for part in re.split(r"(`[^`]*`)", plain)
    )


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("command-reference", CommandReference)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
