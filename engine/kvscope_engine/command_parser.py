"""argparse the way our commands use it: errors are BadInput, help shows units and defaults.

Owns how options are read from text (sizes, counts); knows no command.
"""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.options import read_size


class CommandParser(argparse.ArgumentParser):
    """Raises BadInput where argparse would print its usage and exit; no abbreviated options."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs | {"allow_abbrev": False, "formatter_class": HelpFormatter})

    def error(self, message: str) -> NoReturn:
        """What argparse calls for anything it cannot accept."""
        raise BadInput(f"{message} (see `{self.prog} --help`)")


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Defaults are shown, except where the text already tells what happens without the option."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, argparse.SUPPRESS, []) or not action.option_strings:
            return action.help
        if "(default:" in (action.help or ""):  # with a unit, or in words
            return action.help
        return super()._get_help_string(action)


def parse_size(text: str) -> int:
    """Parse a size in bytes, as `read_size` does."""
    try:
        return read_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not accepted: {error}") from None


def whole_number(text: str) -> int:
    """A whole number; its range is checked by who uses it."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not accepted: a whole number") from None


def number(text: str) -> float:
    """A number; its range is checked by who uses it."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not accepted: a number") from None
