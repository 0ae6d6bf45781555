"""Values of the commands' options as they are read from text."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path
from typing import Final

from kvscope_telemetry.recordings.sample import path_of

_UNITS: Final = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?", re.IGNORECASE)


def recording_file(text: str) -> Path:
    """Parse a recording's path, or the word for the recording that comes with kvscope."""
    return Path(path_of(text))


def span(text: str) -> float:
    """Parse a number of seconds above 0."""
    seconds = _number(text)
    if not 0 < seconds < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not accepted: seconds, more than 0")
    return seconds


def moment(text: str) -> float:
    """Parse seconds from the start of a recording."""
    seconds = _number(text)
    if not 0 <= seconds < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not accepted: seconds from the start, 0 or more")
    return seconds


def size(text: str) -> int:
    """Parse a size in bytes: 100MB, 1GiB, 5000000."""
    match = _SIZE.fullmatch(text.strip())
    units = _BINARY_UNITS if match and match[3] else _UNITS
    num_bytes = float(match[1]) * units[match[2].upper()] if match else 0.0
    if not 1 <= num_bytes < 1 << 62:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not accepted: a size such as 100MB or 1GiB")
    return int(num_bytes)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def add_goals(parser: argparse.ArgumentParser, what: str) -> None:
    """`--goodput`, as vLLM's benchmark has it."""
    parser.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help=f"goals of requests, of ttft, tpot and e2el in milliseconds, as ttft:200 tpot:50: {what}",
    )
