"""Command `kvscope-engine replay`: replays a recording of a deterministic engine and compares the runs bit by bit."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kvscope_engine.cli.arguments.engine_options import add_engine_options, engine_option_values
from kvscope_engine.cli.lazy_engine import engine_class
from kvscope_engine.cli.notices import print_notices
from kvscope_engine.model.loader.download.progress import IMPORT, TerminalProgress
from kvscope_engine.run_replay import ReplayComparison, Replayer, config_of_run, read_run
from kvscope_engine.server.service import error_line
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.telemetry import Progress
from kvscope_telemetry.options import options_of
from kvscope_telemetry.printable import print_line
from kvscope_telemetry.recordings.sample import named_recording


def add_parser(commands: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "replay",
        help="run a recording's requests again and report the first difference",
        description=(
            "Run the requests of a recording again on an engine, and compare keys, values, logits and tokens with "
            "the recorded ones bit by bit. Record with `kvscope-engine serve --deterministic --fingerprints --record "
            "FILE.mcap --record-text`. Exit code 0: equal; 1: different; 2: not comparable."
        ),
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="the recording")
    add_engine_options(parser)
    # options that are not given are those of the recording
    parser.set_defaults(run=run, **dict.fromkeys(options_of(EngineConfig)))
    return parser


def run(args: argparse.Namespace) -> int:
    """Replay the recording and print the comparison.

    Returns 0 if both runs are equal, else 1. Raises BadInput if they cannot be compared.
    """
    try:
        comparison = _replay(args)
        for line in comparison.lines:
            print_line(line)
    except BadInput:
        raise
    except Exception as error:
        raise BadInput(f"recording {str(args.file)!r} could not be run again: {error_line(error)}") from error
    return 1 if comparison.first else 0


def _replay(args: argparse.Namespace) -> ReplayComparison:
    recorded = read_run(named_recording(args.file))
    config = config_of_run(recorded.hello, engine_option_values(args))
    bar, replayer = TerminalProgress(), Replayer(recorded)
    bar(Progress(stage=IMPORT))
    with engine_class()(config, progress=bar, publish=replayer.receive) as engine:
        bar.close()
        comparison = replayer.replay(engine)
    print_notices(engine.notes)
    return comparison
