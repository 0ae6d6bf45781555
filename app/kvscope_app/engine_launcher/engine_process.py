"""The desktop's own engine: a child process with a private folder for sockets and log. Imports no Qt.

The folder (mode 0700) is in the user's runtime folder, or is a temporary one, so that other users can neither connect
nor read the log.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from kvscope_app.engine_launcher.process_identity import identity_of, is_alive
from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.operating_system import is_own, own_session
from kvscope_telemetry.transport.bind_address import folder_for_sockets

PREFIX: Final = "kvscope-"
_OWNERS: Final = "owners"
LOG_TAIL_BYTES: Final = 64 << 10
END_AFTER_S: Final = 1.5
"""Seconds to wait after a shutdown request before SIGTERM, and the same after SIGTERM before SIGKILL."""
KEEP_FLAG: Final = "--kv-disk-keep"
KEEP_AFTER_S: Final = 25.0
"""Replaces `END_AFTER_S` for an engine with `KEEP_FLAG`, which takes up to 20 s to save its cache to a file."""
_POLL_S: Final = 0.02


def serve_command(endpoint: str, options: Sequence[str], keep: bool) -> list[str]:
    """Return the command line of a kvscope engine. Raises KvscopeError if the engine is not installed.

    Unless `keep`, the engine ends when the desktop's process does.
    """
    if sys.platform in ("win32", "darwin"):
        raise KvscopeError("kvscope's engine runs on Linux only: watch one that runs elsewhere with --attach ADDRESS")
    if find_spec("kvscope_engine") is None or find_spec("torch") is None:
        raise KvscopeError(
            "the engine is not installed here: pip install 'kvscope[engine]',"
            " or watch one that runs elsewhere with --attach ENDPOINT"
        )
    command = [sys.executable, "-m", "kvscope_engine.cli.main", "serve", "--endpoint", endpoint, *options]
    return command if keep else [*command, "--exit-with-parent"]


class EngineProcess:
    """Runs a command that serves `endpoint`, and reports whether and why it ended."""

    def __init__(self, options: Sequence[str] = (), keep: bool = False, command: Sequence[str] | None = None) -> None:
        """Create the folder without starting the engine.

        Args:
            options: Options of the engine's `serve` command.
            keep: Whether `close` leaves a running engine and its folder alone.
            command: Replaces the engine's command; `{endpoint}` in it is replaced by the endpoint.

        Raises:
            KvscopeError: The engine is not installed.
        """
        self.keeps_running = keep
        parent = folder_for_sockets(PREFIX)
        remove_stale(parent)
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        record_owner(self.folder, os.getpid())
        self.endpoint = f"ipc://{self.folder}/telemetry"
        self.log_path = self.folder / "engine.log"
        self._process: subprocess.Popen[bytes] | None = None
        try:
            formatted = None if command is None else [part.format(endpoint=self.endpoint) for part in command]
            self._command = formatted or serve_command(self.endpoint, options, keep)
        except KvscopeError:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def set_option(self, flag: str, value: str) -> None:
        """Set an option for the engine's next start, replacing its previous value."""
        self._command = [part for part in self._command if not part.startswith(f"{flag}=")] + [f"{flag}={value}"]

    def start(self) -> None:
        """Start the process with an empty log. Raises KvscopeError if the program cannot be run."""
        assert not self.is_running, "one engine at a time"
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        with self.log_path.open("wb") as log:
            try:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    **own_session(),  # Ctrl-C in the terminal ends the desktop, which ends the engine
                )
            except OSError as error:
                raise KvscopeError(f"the engine cannot be started: {error}") from error
        record_owner(self.folder, self._process.pid)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Process id; 0 before the first start."""
        return 0 if self._process is None else self._process.pid

    def end_reason(self) -> str | None:
        """Return why the engine ended, in one line; None while it runs and before the first start."""
        code = None if self._process is None else self._process.poll()
        if code is None:
            return None
        if code < 0:
            return f"killed by {_signal_name(-code)}"
        last_line = self._last_log_line()
        return last_line or ("it exited normally" if code == 0 else f"exit code {code}")

    def log_text(self) -> str:
        """Return the last `LOG_TAIL_BYTES` of the log as text; empty if the log cannot be read."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(0, self.log_path.stat().st_size - LOG_TAIL_BYTES))
                text = log.read().decode("utf-8", "replace")
        except OSError:
            return ""
        return "\n".join(line.rsplit("\r", 1)[-1] for line in text.removesuffix("\n").split("\n"))

    def terminate(self) -> None:
        if self._process is not None and self.is_running:
            self._process.terminate()

    @property
    def end_after_s(self) -> float:
        """Seconds to wait for the engine to end after a shutdown request or SIGTERM."""
        return KEEP_AFTER_S if KEEP_FLAG in self._command else END_AFTER_S

    def kill(self) -> None:
        if self._process is not None and self.is_running:
            self._process.kill()

    def close(self, was_shutdown_requested: bool = False) -> None:
        """End the process and remove the folder, unless the engine is running and `keep` is set.

        Blocks for at most 2 * `end_after_s` + `END_AFTER_S` seconds.

        Args:
            was_shutdown_requested: Whether a shutdown command was sent. The engine first gets time to end by itself.
        """
        if self.keeps_running and self.is_running:
            return
        if not (was_shutdown_requested and self._wait(self.end_after_s)):
            self.terminate()
            if not self._wait(self.end_after_s):
                self.kill()
                self._wait(END_AFTER_S)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _wait(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.is_running and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return not self.is_running

    def _last_log_line(self) -> str:
        lines = [line.strip().removeprefix("kvscope-engine: ") for line in self.log_text().splitlines() if line.strip()]
        messages = [line for line in lines if not line.startswith("weights: ")]  # printed at start: not a reason to end
        return messages[-1][:300] if messages else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# Private folders of engines started by desktops: their owners, and the removal of folders of killed owners.
#
# Each folder has a file with the identities of its desktop and engine. The folder is removed when neither process runs.
# A folder without recorded owners stays, because it may be in use.
def record_owner(folder: Path, pid: int) -> None:
    """Record process `pid` as a further owner of `folder`: the folder is kept while the process runs."""
    # If the disk is full, the owner is not recorded, and the folder may be left behind.
    with suppress(OSError), (folder / _OWNERS).open("a") as file:
        file.write(f"{identity_of(pid)}\n")


def remove_stale(parent: Path) -> list[Path]:
    """Remove this user's folders in `parent` for which no owner process runs any more. Returns the removed folders."""
    stale = [folder for folder in _folders_of_user(parent) if _is_stale(folder)]
    for folder in stale:
        shutil.rmtree(folder, ignore_errors=True)
    return stale


def _folders_of_user(parent: Path) -> Iterator[Path]:
    with suppress(OSError):
        for entry in list(os.scandir(parent)):
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                is_ours = is_own(status) and stat.S_ISDIR(status.st_mode)
                if entry.name.startswith(PREFIX) and is_ours:
                    yield Path(entry.path)


def _is_stale(folder: Path) -> bool:
    try:
        owners = (folder / _OWNERS).read_text().split()
    except (OSError, UnicodeDecodeError):
        return False
    return bool(owners) and not any(is_alive(owner) for owner in owners)
