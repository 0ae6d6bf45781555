"""Parsers for values of command-line options."""

from __future__ import annotations

import argparse
import math

from kvscope_telemetry.options import read_size


def parse_duration(text: str) -> float:
    """Parse a positive number of seconds."""
    seconds = _number(text)
    if not 0 < seconds < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not accepted: seconds, more than 0")
    return seconds


def parse_moment(text: str) -> float:
    """Parse seconds from the start of a recording, 0 or more."""
    seconds = _number(text)
    if not 0 <= seconds < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not accepted: seconds from the start, 0 or more")
    return seconds


def parse_size(text: str) -> int:
    """Parse a size in bytes: `100MB`, `1GiB`, `5000000`."""
    try:
        return read_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not accepted: {error}") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def add_goodput_option(parser: argparse.ArgumentParser, subject: str) -> None:
    """Add `--goodput`, which takes latency goals such as `ttft:200 tpot:50`. `subject` completes its help text."""
    parser.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help=f"latency goals in milliseconds for ttft, tpot and e2el, such as ttft:200 tpot:50: {subject}",
    )
