"""Option for the sampling interval of devices, shared by `serve` and `kvscope-engine sample`."""

from __future__ import annotations

import argparse

from kvscope_engine.command_parser import number
from kvscope_telemetry.devices.device_watch import LONGEST_SAMPLE_S, SAMPLE_S, SHORTEST_SAMPLE_S


def add_interval_option(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument(
        name,
        type=_interval,
        default=SAMPLE_S,
        metavar="SECONDS",
        help=f"seconds between readings of GPUs, memory and CPU, {SHORTEST_SAMPLE_S:g} to {LONGEST_SAMPLE_S:g}",
    )


def _interval(text: str) -> float:
    seconds = number(text)
    if not SHORTEST_SAMPLE_S <= seconds <= LONGEST_SAMPLE_S:
        raise argparse.ArgumentTypeError(
            f"{text!r:.60} is not accepted: seconds from {SHORTEST_SAMPLE_S:g} to {LONGEST_SAMPLE_S:g}"
        )
    return seconds
