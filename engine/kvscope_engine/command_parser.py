"""Argument parser of all commands: errors are raised as BadInput, help texts show defaults. Defines how sizes and
numbers are parsed.
"""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.options import read_size


class CommandParser(argparse.ArgumentParser):
    """ArgumentParser that raises BadInput instead of exiting, and refuses abbreviated options."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs | {"allow_abbrev": False, "formatter_class": HelpFormatter})

    def error(self, message: str) -> NoReturn:
        raise BadInput(f"{message} (see `{self.prog} --help`)")


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the default of each option unless its help text states it."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, argparse.SUPPRESS, []) or not action.option_strings:
            return action.help
        if "(default:" in (action.help or ""):  # with a unit or as text
            return action.help
        return super()._get_help_string(action)


def parse_size(text: str) -> int:
    """Parse a size such as "512MiB" to bytes."""
    try:
        return read_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not accepted: {error}") from None


def parse_int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not accepted: must be a whole number") from None


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not accepted: must be a number") from None
