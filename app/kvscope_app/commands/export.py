"""`kvscope export`: writes a recording, or a time range of it, in another format."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any, Final

from kvscope_app.commands.progress import ProgressBar
from kvscope_app.media_export.media_names import STILL_SUFFIXES, VIDEO_SUFFIXES, is_picture
from kvscope_app.media_export.picture_options import add_picture_options, picture_spec
from kvscope_app.option_values import add_goodput_option, parse_moment
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.exports.kinds import FORMATS, TABLE_NAMES, TABLES
from kvscope_telemetry.printable import print_line
from kvscope_telemetry.recordings.sample import named_recording

_PICTURES: Final = ("png", "svg", "video")


def add_export_parser(commands: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    tables = ", ".join(form.name for form in FORMATS if form.is_of_tables)
    rows = ", ".join(f"{kind.name} has a row per {kind.row}" for kind in TABLES)
    parser: argparse.ArgumentParser = commands.add_parser(
        "export",
        help="export a recording: CSV, Parquet, Arrow, Perfetto, HTML report, pictures, videos",
        description=f"Export a recording, or a range of it, as a table ({tables}; {rows}), a trace for"
        " ui.perfetto.dev (perfetto), a self-contained report (html), a picture of a view at a moment"
        " (png, svg), or a video of a view over the range (video: .mp4 by ffmpeg; .webp, .gif and .apng by Pillow)."
        " Needs no display. Existing files are not overwritten.",
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="FILE.mcap", type=Path, help="a recording; or the word sample or sample-hybrid")
    formats = (*(form.name for form in FORMATS), *_PICTURES)
    parser.add_argument(
        "--to",
        choices=formats,
        help="format (default: by the extension of PATH)",
    )
    parser.add_argument(
        "--out",
        metavar="PATH",
        type=Path,
        required=True,
        help="metrics.csv, requests.parquet, events.arrow, trace.perfetto-trace, report.html, map.png, map.mp4, …;"
        " with --to also a named pipe, or - for standard output",
    )
    parser.add_argument(
        "--kind",
        choices=TABLE_NAMES,
        help="table to write (default: by the name of PATH, else metrics)",
    )
    parser.add_argument(
        "--from", dest="from_s", metavar="S", type=parse_moment, help="seconds from the recording's start"
    )
    parser.add_argument(
        "--until", dest="until_s", metavar="S", type=parse_moment, help="seconds from the recording's start"
    )
    add_goodput_option(parser, "list finished requests that missed them in the report, and what delayed each")
    add_picture_options(parser)
    parser.set_defaults(run=export)
    return parser


def export(args: argparse.Namespace) -> int:
    """Export the recording and print the name and size of the new file.

    Raises BadInput for a file name without a known extension.
    """
    endings = (*(suffix for form in FORMATS for suffix in form.suffixes), *STILL_SUFFIXES, *VIDEO_SUFFIXES)
    if args.to is None and args.out.suffix.lower() not in endings:
        raise BadInput(f"{str(args.out)!r} is not accepted: choose one of {', '.join(endings)}, or a format with --to")
    return _export_picture(args) if is_picture(args.out, args.to) else _export_data(args)


def _export_data(args: argparse.Namespace) -> int:
    from kvscope_app.session.recording.bookmark_file import bookmark_file, read_bookmarks
    from kvscope_telemetry.exports import export as exports
    from kvscope_telemetry.recordings.reader import Recording
    from kvscope_telemetry.slo import read_goals

    picture_spec(args, is_wanted=False)
    target, goals = exports.ExportTarget.from_path(args.out, args.kind, args.to), read_goals(args.goodput)
    if goals and target.suffix not in exports.REPORT_FORMATS:
        raise BadInput(f"--goodput goes with {', '.join(exports.REPORT_FORMATS)}, not with {target.suffix}")
    with ProgressBar("exporting") as progress:
        recording = Recording.open(named_recording(args.file))
        bookmarks = read_bookmarks(bookmark_file(recording))
        exports.export(recording, target, args.from_s, args.until_s, progress.report_progress, bookmarks, goals)
    _report(args.out, recording.damage_summary)
    return 0


def _export_picture(args: argparse.Namespace) -> int:
    from kvscope_app.window.display_server import require_qt, require_sound_qt
    from kvscope_telemetry.recordings.reader import Recording

    spec = picture_spec(args)
    if args.goodput:
        raise BadInput("--goodput goes with .html, not with a picture")
    assert spec is not None, "a picture is asked for"
    os.environ["QT_QPA_PLATFORM"] = "offscreen"
    require_qt()
    require_sound_qt()
    from kvscope_app.media_export.picture_command import export_picture

    with ProgressBar("exporting", is_forced=args.tell_progress) as progress:
        recording = Recording.open(named_recording(args.file))
        export_picture(recording, spec, progress.report_progress)
    _report(args.out, recording.damage_summary)
    return 0


def _report(path: Path, remark: str) -> None:
    """Print the size of the written file, and `remark` about the recording, unless the export went to a stream."""
    from kvscope_telemetry.exports.new_file import is_stream

    if not is_stream(path):
        print_line(f"{path}: {path.stat().st_size / 1e6:.2f} MB" + (f" ({remark})" if remark else ""))
