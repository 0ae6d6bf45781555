"""`kvscope recover`: writes the readable part of a truncated or damaged recording to a new, complete recording."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kvscope_app.commands.progress import ProgressBar
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.printable import print_line
from kvscope_telemetry.recordings.sample import is_sample, named_recording


def add_recover_parser(commands: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "recover",
        help="repair a truncated or damaged recording",
        description="Write what can be read of FILE to a new recording, and rebuild its summaries and index. FILE"
        " is not changed.",
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="the recording: FILE.mcap or FILE.mcap.part")
    parser.add_argument("--out", metavar="OTHER.mcap", type=Path, help="the new file (default: FILE-recovered.mcap)")
    parser.set_defaults(run=recover)
    return parser


def recover(args: argparse.Namespace) -> int:
    """Write the new recording and print a summary. Raises BadInput if the output is the input file."""
    from kvscope_telemetry.recordings.reader import Recording
    from kvscope_telemetry.recordings.save import save

    file = named_recording(args.file)
    name = file.name.removesuffix(".part").removesuffix(".mcap") + "-recovered.mcap"
    out = args.out or (Path(name) if is_sample(file) else file.with_name(name))
    if out.resolve() == file.resolve():
        raise BadInput(f"--out {str(out)!r} is the input file: choose another name")
    with ProgressBar("recovering") as progress:
        recording = Recording.open(file)
        saved = save(recording, out, watch=progress.report_progress)
    lost = f", {saved.num_without_state:,} of them without a preceding state" if saved.num_without_state else ""
    print_line(f"{out}: {saved.num_frames:,} frames, {saved.length_s:,.1f} s{lost}")
    for line in recording.damage_details.splitlines():
        print_line(f"  {file}: {line}")
    return 0
