"""argparse the way our commands use it: errors are BadInput, help shows units and defaults.

Owns how options are read from text (sizes, counts); knows no command.
"""

from __future__ import annotations

import argparse
import math
import re
from typing import Any, Final, NoReturn

from kvscope_telemetry.errors import BadInput

SIZE_UNITS: Final = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "K": 1 << 10,
    "M": 1 << 20,
    "G": 1 << 30,
    "T": 1 << 40,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}


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
    """Bytes in `512MiB`, `1.5GB`, `4G` (binary) or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    unit = SIZE_UNITS.get(match[2].upper()) if match else None
    num_bytes = float(match[1]) * unit if match and unit else 0.0
    if not 1 <= num_bytes < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not accepted: a size such as 512MiB or 2GB")
    return int(num_bytes)


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
