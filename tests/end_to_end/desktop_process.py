"""Run the app of `scripted_desktop.py` as a process with its own folders, and a simulated engine for it to watch."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from tests.simulated_engine.command import COMMAND

PATIENCE_S = 300.0
"""No step takes this long, even on a busy machine."""


class DesktopProcess:
    """An app process with its files below `home`; nothing is left of it after a `with` block."""

    def __init__(self, endpoint: str, home: Path) -> None:
        self.rings = home / "cache" / "kvscope" / "rings"
        folders = {f"XDG_{name.upper()}_HOME": str(home / name) for name in ("cache", "config", "data")}
        for folder in folders.values():
            Path(folder).mkdir(parents=True, exist_ok=True)
        program = Path(__file__).with_name("scripted_desktop.py")
        self.process = subprocess.Popen(
            [sys.executable, str(program), endpoint],
            env={**os.environ, **folders, "QT_QPA_PLATFORM": "offscreen"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._said: list[str] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()

    def send_line(self, line: str) -> None:
        """Write a line to its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def wait_for(self, begin: str) -> str:
        """Return the first unread line that begins with `begin`."""
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            found = next((line for line in self._said if line.startswith(begin)), None)
            if found is not None:
                self._said.remove(found)
                return found
            assert time.monotonic() < deadline_s, f"no {begin!r} came, only {self._said}"
            try:
                self._said.append(self._lines.get(timeout=1.0))
            except queue.Empty:
                assert self.process.poll() is None, f"it ended with {self.process.returncode}, after {self._said}"

    def kill(self) -> None:
        """Kill the process like `kill -9`."""
        self.process.kill()
        self._end()

    def quit(self) -> int:
        """Close the window and return the exit code."""
        self.send_line("quit")
        return self._end()

    def _end(self) -> int:
        code = self.process.wait(PATIENCE_S)
        self._thread.join()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        return code

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.rstrip())


@contextlib.contextmanager
def simulated_engine(endpoint: str, blocks: int, rate: float) -> Iterator[None]:
    """Run a simulated engine that serves until the end of the block."""
    command = [*COMMAND, "--endpoint", endpoint, "--until-eof"]
    command += ["--blocks", str(blocks), "--rate", str(rate)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline().startswith("serving")
        try:
            yield
        finally:
            process.stdin.close()
            process.wait(PATIENCE_S)
