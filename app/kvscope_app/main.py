"""The `kvscope` command: parses the command line, starts the engine, opens windows and returns the exit code.

The engine starts first and loads while Qt is imported; plots are imported after the window is shown. This module and
its imports do not import torch.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kvscope_app.command_line import PROGRAM, Options, parse
from kvscope_app.commands.compare import add_compare_parser
from kvscope_app.commands.desktop_files import add_desktop_files_parser
from kvscope_app.commands.export import add_export_parser
from kvscope_app.commands.find import add_find_parser
from kvscope_app.commands.fleet import add_fleet_parser
from kvscope_app.commands.info import add_info_parser
from kvscope_app.commands.inside import add_inside_parser
from kvscope_app.commands.query import add_query_parser
from kvscope_app.commands.record import add_record_parser
from kvscope_app.commands.recover import add_recover_parser
from kvscope_app.commands.replay_command import add_replay_parser
from kvscope_app.commands.top import add_top_parser
from kvscope_telemetry.errors import BadInput, KvscopeError
from kvscope_telemetry.home_folder import ensure_home
from kvscope_telemetry.printable import print_line
from kvscope_telemetry.standard_streams import ready_streams
from kvscope_telemetry.termination import INTERRUPTED, exiting_on_signals, leaving_while_importing

if TYPE_CHECKING:
    from kvscope_app.playback.recording_opening import RecordingOpening

_OPENING_WINDOW_DELAY_S: Final = 0.5
"""Seconds to wait for recordings before windows open that show the progress of loading.

If a recording fails to open within this time, the command ends with an error message and no window opens.
"""

COMMANDS: Final = (
    add_info_parser,
    add_record_parser,
    add_top_parser,
    add_inside_parser,
    add_export_parser,
    add_query_parser,
    add_recover_parser,
    add_compare_parser,
    add_fleet_parser,
    add_find_parser,
    add_desktop_files_parser,
    add_replay_parser,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the desktop until its windows are closed, or a command. Returns the exit code."""
    with exiting_on_signals(), ready_streams():
        return _run_command(list(sys.argv[1:] if argv is None else argv))


def _run_command(arguments: list[str]) -> int:
    try:
        ensure_home()
        command = parse(arguments, COMMANDS)
        result = command if isinstance(command, Options) else command()
        return run(result) if isinstance(result, Options) else result
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `ready_streams` handles it
        raise
    except KvscopeError as error:
        return _report_failure(arguments, str(error), error.exit_code)
    except Exception as error:
        return _report_failure(arguments, f"{type(error).__name__}: {error}", 1)


def run(options: Options) -> int:
    from kvscope_app.window.display_server import require_display, require_qt, require_sound_qt

    require_display(os.environ)
    openings = _start_opening(options.recordings)
    engine = None
    if not options.attach and not options.recordings and options.fleet is None:
        from kvscope_app.engine_launcher.engine_process import EngineProcess

        engine = EngineProcess(options.engine, options.keep_engine)
        engine.start()
    try:
        with leaving_while_importing(PROGRAM, None if engine is None else engine.close):
            require_qt()
            require_sound_qt()
            from kvscope_app.desktop import run_desktop

            _wait_for_openings(openings)
            return run_desktop(options, engine, openings)
    finally:
        for opening in openings:
            opening.cancel()
        if engine is not None:
            engine.close()  # does nothing after a normal shutdown
            if engine.keeps_running and engine.is_running:
                print_line(f"The engine runs on; watch it with: {PROGRAM} --attach {engine.endpoint}")


def _start_opening(paths: Sequence[str]) -> list[RecordingOpening]:
    if not paths:
        return []
    from kvscope_app.playback.recording_opening import RecordingOpening
    from kvscope_telemetry.recordings.sample import named_recording

    return [RecordingOpening(str(named_recording(path))) for path in paths]


def _wait_for_openings(openings: Sequence[RecordingOpening]) -> None:
    """Wait up to `_OPENING_WINDOW_DELAY_S` for the recordings.

    Raises BadInput for one that cannot be opened.
    """
    deadline_s = time.monotonic() + _OPENING_WINDOW_DELAY_S
    for opening in openings:
        opening.wait(max(deadline_s - time.monotonic(), 0.0))
    for opening in openings:
        if opening.failure:
            raise BadInput(opening.failure)


def _report_failure(arguments: Sequence[str], message: str, exit_code: int) -> int:
    if "--debug" in arguments:
        traceback.print_exc()
    print_line(f"{PROGRAM}: {message}", file=sys.stderr)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
