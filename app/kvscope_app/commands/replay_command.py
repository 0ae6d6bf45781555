"""`kvscope replay`: starts the engine to run a recording's requests again, and waits until it ends."""

from __future__ import annotations

import argparse
import os
import subprocess
from pathlib import Path
from typing import Any

from kvscope_app.command_line import PROGRAM, add_engine_options, engine_arguments
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.recordings.sample import named_recording


def add_replay_parser(commands: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "replay",
        help="run a recording's requests again and report the first difference",
        description=(
            "Run the requests of a recording again on an engine, and compare keys, values, logits and tokens with "
            "the recorded ones bit by bit. Record with `kvscope-engine serve --deterministic --fingerprints --record "
            "FILE.mcap --record-text`. Options override those of the recorded engine. Exit code 0: equal; 1: "
            "different; 2: not comparable."
        ),
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="the recording")
    add_engine_options(parser)
    parser.set_defaults(run=replay)
    return parser


def replay(args: argparse.Namespace) -> int:
    """Return the engine's exit code. Raises BadInput if the engine is not installed or was killed by a signal."""
    from kvscope_app.engine_launcher.line_process import engine_command

    command = engine_command("replay", str(named_recording(args.file)), *engine_arguments(args))
    if command is None:
        raise BadInput("replaying needs the engine, which is not installed: pip install 'kvscope[engine]'")
    code = subprocess.run(command, check=False, env={**os.environ, "KVSCOPE_STARTED_AS": PROGRAM}).returncode
    if code < 0:
        raise BadInput(f"recording {str(args.file)!r} could not be replayed: signal {-code} ended the engine")
    return code
