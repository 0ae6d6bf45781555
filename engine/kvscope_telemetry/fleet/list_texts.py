"""Sources of the text of an address list: a file, or the output of a command. Size and time are bounded.

A command runs without a shell; to use shell syntax, write it as `sh -c '...'`. Raises BadInput with a message for users
if reading fails.
"""

from __future__ import annotations

import os
import selectors
import shlex
import stat
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

from kvscope_telemetry import operating_system
from kvscope_telemetry.errors import BadInput

MAX_LIST_BYTES: Final = 1 << 20
COMMAND_S: Final = 30.0
_POLL_INTERVAL_S: Final = 0.1
_MAX_ERROR_BYTES: Final = 2_000
_PIECE_BYTES: Final = 1 << 16


class ListText(Protocol):
    """Source of a list's text. Each `read` reads it again; setting `stopped` cancels reading."""

    trouble: str
    """Errors of the last `read` that left out a part of the list, as one line of text; empty if there were none."""

    @property
    def name(self) -> str: ...

    def read(self, stopped: threading.Event) -> str: ...


class FileText:
    trouble = ""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def name(self) -> str:
        return str(self._path)

    def read(self, stopped: threading.Event) -> str:
        try:
            path = self._path.expanduser()
            if not stat.S_ISREG(path.stat().st_mode):
                raise BadInput(f"{str(self._path)!r} is not a file")
            with path.open("rb") as file:
                data = file.read(MAX_LIST_BYTES + 1)
        except OSError as error:
            raise BadInput(f"{str(self._path)!r} cannot be read: {error.strerror}") from None
        return _decoded(data, repr(str(self._path)))


class CommandText:
    """Output of `command`. Raises BadInput if the command cannot be split into arguments."""

    trouble = ""

    def __init__(self, command: str, limit_s: float = COMMAND_S) -> None:
        self._command, self._limit_s = command, limit_s
        try:
            self._arguments = shlex.split(command)
        except ValueError as error:
            raise BadInput(f"command {command!r} is not accepted: {error}") from None
        if not self._arguments:
            raise BadInput(f"command {command!r} is not accepted: it is empty")

    @property
    def name(self) -> str:
        return self._command

    def read(self, stopped: threading.Event) -> str:
        """Run the command once. All processes that it starts are killed when it ends."""
        try:
            process = subprocess.Popen(
                self._arguments,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                **operating_system.own_session(),
            )
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise BadInput(f"{self._arguments[0]!r} cannot be run: {reason}") from None
        with process:
            try:
                output, errors = self._output(process, stopped)
                code = self._end(process, stopped)
            finally:
                operating_system.kill_session(process)
        if code:
            error_text = " ".join(errors.decode("utf-8", "replace").split())
            raise BadInput(
                f"{self._arguments[0]!r} failed (exit code {code})" + (f": {error_text[:300]}" if error_text else "")
            )
        return _decoded(output, f"what {self._arguments[0]!r} printed")

    def _output(self, process: subprocess.Popen[bytes], stopped: threading.Event) -> tuple[bytes, bytes]:
        assert process.stdout is not None
        assert process.stderr is not None
        outputs = {process.stdout: bytearray(), process.stderr: bytearray()}
        deadline_s = time.monotonic() + self._limit_s
        with selectors.DefaultSelector() as selector:
            for stream in outputs:
                selector.register(stream, selectors.EVENT_READ)
            while selector.get_map():
                self._check_time(deadline_s, stopped)
                for key, _ in selector.select(_POLL_INTERVAL_S):
                    data = os.read(key.fd, _PIECE_BYTES)
                    if not data:
                        selector.unregister(key.fileobj)
                    elif key.fileobj is process.stdout:
                        outputs[process.stdout] += data
                        if len(outputs[process.stdout]) > MAX_LIST_BYTES:
                            raise BadInput(f"{self._arguments[0]!r} prints more than {MAX_LIST_BYTES >> 20} MiB")
                    else:
                        num_bytes_left = _MAX_ERROR_BYTES - len(outputs[process.stderr])
                        outputs[process.stderr] += data[:num_bytes_left]
        return bytes(outputs[process.stdout]), bytes(outputs[process.stderr])

    def _end(self, process: subprocess.Popen[bytes], stopped: threading.Event) -> int:
        """Wait until the command ends, and return its exit code. The end of its output is not enough, because a
        command may close its output and continue.
        """
        deadline_s = time.monotonic() + self._limit_s
        while True:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(_POLL_INTERVAL_S)
            self._check_time(deadline_s, stopped)

    def _check_time(self, deadline_s: float, stopped: threading.Event) -> None:
        if stopped.is_set():
            raise BadInput("it was stopped")
        if time.monotonic() > deadline_s:
            raise BadInput(f"{self._arguments[0]!r} did not finish within {self._limit_s:g} s")


def _decoded(data: bytes, what: str) -> str:
    if len(data) > MAX_LIST_BYTES:
        raise BadInput(f"{what} has more than {MAX_LIST_BYTES >> 20} MiB")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise BadInput(f"{what} is not text") from None
