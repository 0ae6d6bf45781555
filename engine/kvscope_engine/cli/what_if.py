"""Command `kvscope-engine what-if`: simulates the running requests with other allocators, or a recording with other
settings, one question per input line, for the desktop.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvscope_telemetry.messages.what_if_question import WhatIfComparison, WhatIfQuestion

_NICENESS: Final = 10
"""Niceness of the process. Its priority is low because the observed engine may run on the same cores."""


def add_parser(commands: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "what-if",
        help="simulate running requests with other allocators (used by the desktop)",
        description="Read JSON lines from standard input: the memory once, then the requests that run now, as often"
        " as wanted. Each time, print one JSON line on what every allocation policy would make of them. A question"
        " about a recording is answered with lines of progress and a comparison. Ends with the input.",
    )
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    from kvscope_engine.simulator.what_if.line_protocol import answer_lines

    os.nice(_NICENESS)
    answer_lines(sys.stdin.buffer, sys.stdout.buffer, _answer_question)
    return 0


def _answer_question(question: WhatIfQuestion, report: Callable[[float], object]) -> WhatIfComparison:
    from kvscope_engine.cli.arguments.recorded_setups import answer_question  # not needed for other lines

    return answer_question(question, report)
