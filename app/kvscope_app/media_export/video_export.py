"""Makes a video in the background, by running `kvscope export` in a child process.

The child reads the open recording or, for a live session, a copy of its recent history. The window only polls the
progress. When the work ends, even by an error, the child has ended and the copy is deleted.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Final

from kvscope_app.media_export.picture_spec import PictureSpec
from kvscope_app.recording.recording_actions import Task, write_file
from kvscope_app.session.background import Background
from kvscope_app.session.session import Session
from kvscope_app.session_window import SessionWindow
from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.exports.new_file import PART_SUFFIX
from kvscope_telemetry.recordings.read_budget import OpeningCancelled, ProgressCallback
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.save import save

_PROGRAM: Final = "import sys; from kvscope_app.entry import main; sys.exit(main())"
_FAILED: Final = "The video could not be made"
_POLL_S: Final = 0.05
_TERMINATE_TIMEOUT_S: Final = 2.0
_COPY_SHARE: Final = 0.1
"""Fraction of the progress bar, 0 to 1, for copying the history."""


def make_video(window: SessionWindow, spec: PictureSpec) -> Task:
    """Start making the video of `spec`, with a progress display that can cancel it.

    Times in `spec` count from the timeline's origin.
    """
    work = Background(_work(window.session, spec), "kvscope-video")
    return write_file(window, work, spec.path, "Making", "The video is in", _FAILED)


def export_arguments(recording: Path, spec: PictureSpec) -> list[str]:
    """Return the arguments of the `kvscope` command that makes the video described by `spec`."""
    args = ["export", str(recording), "--to", "video", "--out", str(spec.path), "--view", spec.view]
    args += ["--speed", f"{spec.speed:g}", "--fps", f"{spec.fps:g}", "--theme", spec.theme]
    args += ["--scale", str(spec.scale)]
    args += [] if spec.size is None else ["--size", f"{spec.size[0]}x{spec.size[1]}"]
    for flag, seconds in (("--from", spec.from_s), ("--until", spec.until_s)):
        args += [] if seconds is None else [flag, f"{max(seconds, 0.0):.3f}"]
    return [*args, *(["--caption"] if spec.captioned else []), "--tell-progress"]


def _work(session: Session, spec: PictureSpec) -> Callable[[ProgressCallback], Path]:
    """Return the function that the worker thread runs. The session is read here, on the caller's thread."""
    player, handle = session.timeline.player, session.new_recording_handle()
    path = player.recording.path if session.timeline.is_file and player is not None else None

    def work(report_progress: ProgressCallback) -> Path:
        if path is not None and path.is_file():
            _run(path, spec, report_progress, 0.0)
            return spec.path
        if handle is None:
            raise KvscopeError("there is no history to make a video of")
        recording = handle.get(report_progress)
        with tempfile.TemporaryDirectory(prefix="kvscope-video-") as folder:
            copy = Path(folder) / "kept.mcap"
            shift_s = _copy(recording, spec, copy, report_progress)
            until_s = None if spec.until_s is None else spec.until_s - shift_s
            _run(
                copy,
                replace(spec, from_s=(spec.from_s or 0.0) - shift_s, until_s=until_s),
                report_progress,
                _COPY_SHARE,
            )
        return spec.path

    return work


def _copy(recording: Recording, spec: PictureSpec, copy: Path, report_progress: ProgressCallback) -> float:
    """Copy the time range of `spec` to one file. Returns the time at which the copy starts, in seconds of the
    recording.
    """
    from_s = max(spec.from_s or 0.0, recording.first_s)
    save(recording, copy, from_s, spec.until_s, watch=lambda share: report_progress(share * _COPY_SHARE))
    return (Recording.open(copy).start_ns - recording.start_ns) / 1e9


def _run(recording: Path, spec: PictureSpec, report_progress: ProgressCallback, start_share: float) -> None:
    """Run the child process. Its progress is reported as `start_share` to 1.

    Raises:
        KvscopeError: The process failed. The message is the process's own.
        OpeningCancelled: The user cancelled.
    """
    with _process(export_arguments(recording, spec)) as process:
        assert process.stdout is not None, "stdout and stderr are pipes"
        assert process.stderr is not None, "stdout and stderr are pipes"
        if not _read_progress(process.stdout, report_progress, start_share):
            _terminate(process)
            spec.path.with_name(spec.path.name + PART_SUFFIX).unlink(missing_ok=True)
            raise OpeningCancelled
        stderr = process.stderr.read().strip().splitlines()
        if process.wait():
            raise KvscopeError(
                stderr[-1].removeprefix("kvscope: ") if stderr else "it stopped without an error message"
            )


def _terminate(process: subprocess.Popen[str]) -> None:
    """Terminate the process, and kill it if that takes longer than `_TERMINATE_TIMEOUT_S`. Its children end with it."""
    process.terminate()
    try:
        process.wait(_TERMINATE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _read_progress(lines: IO[str], report_progress: ProgressCallback, start_share: float) -> bool:
    for line in lines:
        try:
            progress = float(line)
        except ValueError:
            continue
        if not report_progress(start_share + (1 - start_share) * progress):
            return False
    return True


@contextmanager
def _process(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", _PROGRAM, *command]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
