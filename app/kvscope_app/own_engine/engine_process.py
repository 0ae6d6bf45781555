"""The desktop's own engine: a child process, its private folder for sockets and log, and its end. No Qt.

The folder (mode 0700) is in the user's runtime folder, or a temporary one; other users can neither connect nor look.
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

from kvscope_app.own_engine.process_identity import identity_of, is_alive
from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.sockets.bind_address import folder_for_sockets

PREFIX: Final = "kvscope-"
_OWNERS: Final = "owners"
LOG_TAIL_BYTES: Final = 64 << 10
END_AFTER_S: Final = 1.5
"""How long an engine that was asked to end is waited for before SIGTERM, and again before SIGKILL."""
KEEP_FLAG: Final = "--kv-disk-keep"
KEEP_AFTER_S: Final = 25.0
"""The same for one with that flag: it first writes what is cached to its file, for at most 20 s."""
_POLL_S: Final = 0.02


def serve_command(endpoint: str, options: Sequence[str], keep: bool) -> list[str]:
    """The command line of an engine of ours. Raises KvscopeError where the engine is not installed."""
    if find_spec("kvscope_engine") is None or find_spec("torch") is None:
        raise KvscopeError(
            "the engine is not installed here: pip install 'kvscope[engine]',"
            " or watch one that runs elsewhere with --attach ENDPOINT"
        )
    command = [sys.executable, "-m", "kvscope_engine.cli.main", "serve", "--endpoint", endpoint, *options]
    return command if keep else [*command, "--exit-with-parent"]


class EngineProcess:
    """Starts a command that serves `endpoint`, and knows whether and why it ended."""

    def __init__(self, options: Sequence[str] = (), keep: bool = False, command: Sequence[str] | None = None) -> None:
        """`command` replaces the engine's own; `{endpoint}` in it becomes the endpoint."""
        self.keep = keep
        parent = folder_for_sockets(PREFIX)
        remove_stale(parent)
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        claim(self.folder, os.getpid())
        self.endpoint = f"ipc://{self.folder}/telemetry"
        self.log_path = self.folder / "engine.log"
        self._process: subprocess.Popen[bytes] | None = None
        try:
            given = None if command is None else [part.format(endpoint=self.endpoint) for part in command]
            self._command = given or serve_command(self.endpoint, options, keep)
        except KvscopeError:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def set_option(self, flag: str, value: str) -> None:
        """Set an option for the engine's next start, in place of its earlier value."""
        self._command = [part for part in self._command if not part.startswith(f"{flag}=")] + [f"{flag}={value}"]

    def start(self) -> None:
        """Start it; the log begins anew. Raises KvscopeError when the program cannot be run."""
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
                    start_new_session=True,  # Ctrl-C in the terminal ends the desktop, which ends the engine
                )
            except OSError as error:
                raise KvscopeError(f"the engine cannot be started: {error}") from error
        claim(self.folder, self._process.pid)

    @property
    def is_running(self) -> bool:
        """Whether the process is there."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Of the process, 0 before the first start."""
        return 0 if self._process is None else self._process.pid

    def end_reason(self) -> str | None:
        """Why it ended, in one line; None while it runs or before it was started."""
        code = None if self._process is None else self._process.poll()
        if code is None:
            return None
        if code < 0:
            return f"killed by {_signal_name(-code)}"
        last = self._last_words()
        return last or ("it exited normally" if code == 0 else f"exit code {code}")

    def log_text(self) -> str:
        """The end of what it printed."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(0, self.log_path.stat().st_size - LOG_TAIL_BYTES))
                text = log.read().decode("utf-8", "replace")
        except OSError:
            return ""
        return "\n".join(line.rsplit("\r", 1)[-1] for line in text.removesuffix("\n").split("\n"))

    def terminate(self) -> None:
        """Ask it to end, by SIGTERM."""
        if self._process is not None and self.is_running:
            self._process.terminate()

    @property
    def end_after_s(self) -> float:
        """How long it gets to end by itself once it was told to."""
        return KEEP_AFTER_S if KEEP_FLAG in self._command else END_AFTER_S

    def kill(self) -> None:
        """End it, by SIGKILL."""
        if self._process is not None and self.is_running:
            self._process.kill()

    def close(self, was_asked: bool = False) -> None:
        """End the process, within twice `end_after_s`, and remove the folder; or leave both if it is to be kept.

        `was_asked`: it was told to shut down on its command socket, and gets the time to do so.
        """
        if self.keep and self.is_running:
            return
        if not (was_asked and self._wait(self.end_after_s)):
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

    def _last_words(self) -> str:
        lines = [line.strip().removeprefix("kvscope-engine: ") for line in self.log_text().splitlines() if line.strip()]
        words = [line for line in lines if not line.startswith("weights: ")]  # of its start, and no reason to end
        return words[-1][:300] if words else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# Private folders of the desktops' engines: who they belong to, and the end of those whose owners were killed.
#
# Each folder has a file that names the desktop and the engine it is for. It goes when neither of them lives; one that
# names nobody is not ours to judge, and stays.
def claim(folder: Path, pid: int) -> None:
    """Note that process `pid` needs `folder` as long as it lives, as do those that claimed it before."""
    with suppress(OSError), (folder / _OWNERS).open("a") as file:  # a full disk: the folder is left behind
        file.write(f"{identity_of(pid)}\n")


def remove_stale(parent: Path) -> list[Path]:
    """Remove the folders in `parent` that are this user's and whose owners are all dead; which they were."""
    gone = [folder for folder in _own_folders(parent) if _is_stale(folder)]
    for folder in gone:
        shutil.rmtree(folder, ignore_errors=True)
    return gone


def _own_folders(parent: Path) -> Iterator[Path]:
    with suppress(OSError):
        for entry in list(os.scandir(parent)):
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                is_ours = status.st_uid == os.getuid() and stat.S_ISDIR(status.st_mode)
                if entry.name.startswith(PREFIX) and is_ours:
                    yield Path(entry.path)


def _is_stale(folder: Path) -> bool:
    try:
        owners = (folder / _OWNERS).read_text().split()
    except (OSError, UnicodeDecodeError):
        return False
    return bool(owners) and not any(is_alive(owner) for owner in owners)
