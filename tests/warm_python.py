"""Start processes from a warm Python: torch and the engine are imported once, and each process is a fork of it.

Imports take seconds, the rest of a small engine's start a tenth of one. A started process is like any other: it has
its own id, environment, folder and files, and is killed and waited for as usual. `warm_server.py` forks. Helper
processes of an app are forked from a Python that has imported only their modules.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

CONSOLE_COMMAND = "import sys; from kvscope_engine.cli.entry import main; sys.exit(main())"
READ_LATE = ("KVSCOPE_CACHE", "PYTEST_CURRENT_TEST", "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY", "QT_")
"""Prefixes of environment variables that no import reads. Any other may have been read by one."""
MAX_ANSWER_BYTES = 1 << 12
LOOK_S = 0.005


class Process:
    """Like `subprocess.Popen`, for a process that the server waits for."""

    def __init__(
        self,
        warm: WarmPython,
        words: Sequence[str],
        *files: IO[Any],
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """Start it with `files` for output and errors, and before them input, which is empty by default."""
        self.args = words
        self.returncode: int | None = None
        self.stderr: IO[str] | None = None
        self._warm = warm
        numbers = [file.fileno() for file in files]
        self.pid: int = warm.ask(numbers, words=words, folder=os.getcwd(), environment=dict(environment))

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._warm.ask(ended=self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        until = None if timeout is None else time.monotonic() + timeout
        while (returncode := self.poll()) is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0)
            time.sleep(LOOK_S)
        return returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:  # until then it was not waited for, and its process id is valid
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(9)  # SIGKILL, by its number because without_linux.py hides the name


class PipedProcess(Process):
    """A process whose input and output are pipes."""

    def __init__(self, warm: WarmPython, words: Sequence[str], environment: Mapping[str, str] = os.environ) -> None:
        (read_in, write_in), (read_out, write_out) = os.pipe(), os.pipe()
        self.stdin, self.stdout = open(write_in, "wb"), open(read_out, "rb")  # noqa: SIM115
        with open(read_in, "rb") as given, open(write_out, "wb") as out:
            assert sys.__stderr__ is not None, "pytest's own has no number"
            super().__init__(warm, words, given, out, sys.__stderr__, environment=environment)
        self._ended = os.pidfd_open(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        """Wait without polling."""
        select.select([self._ended], [], [], timeout)
        return super().wait(timeout)

    def __del__(self) -> None:
        os.close(self._ended)


class WarmPython:
    """Start processes that have imported `modules`; by default those of the engine.

    `python` is the interpreter of another environment, which starts with the environment variables `environment`.
    """

    def __init__(
        self, *modules: str, python: str | Path = sys.executable, environment: Mapping[str, str] | None = None
    ) -> None:
        self._environment = _read_early(os.environ)
        self._asking = threading.Lock()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [str(python), str(Path(__file__).with_name("warm_server.py")), str(theirs.fileno()), *modules]
            self._server = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment
            )

    def start(self, words: Sequence[str]) -> Process | subprocess.Popen[bytes]:
        """Start `kvscope-engine WORDS…`, or `-c` with a program and its arguments; `stderr` is a pipe."""
        read_end, write_end = os.pipe()
        with open(write_end, "wb") as errors, open(os.devnull, "wb") as nothing:
            process: Any = self._begin(words, nothing, errors)
        process.stderr = open(read_end, encoding="utf-8")  # noqa: SIM115
        return process  # type: ignore[no-any-return]

    def run(self, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run like `start` to the end, and return the output."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
            returncode = self._begin(words, out, errors).wait()
            out.seek(0)
            errors.seek(0)
            return subprocess.CompletedProcess(list(words), returncode, out.read(), errors.read())

    def ask(self, files: Sequence[int] = (), **question: Any) -> Any:
        """Return the answer of the server."""
        try:
            with self._asking:
                socket.send_fds(self._channel, [json.dumps(question).encode()], list(files))
                answer = self._channel.recv(MAX_ANSWER_BYTES)
        except (
            BaseException
        ):  # a test that takes too long may be stopped here: its answer would be taken for that of the next question
            self._channel.close()
            raise
        assert answer, f"the warm Python ended with {self._server.wait()}; it said why on standard error"
        return json.loads(answer)

    def can_fork(self) -> bool:
        """Return false if another environment is needed; GPUs and other threads do not survive a fork."""
        if self._channel.fileno() == -1 or Path("/dev/nvidiactl").exists():
            return False
        return _read_early(os.environ) == self._environment and self.ask(threads=True) == 1

    def close(self) -> None:
        self._channel.close()
        self._server.wait()

    def _begin(self, words: Sequence[str], out: IO[Any], errors: IO[Any]) -> Process | subprocess.Popen[bytes]:
        if self.can_fork():
            return Process(self, words, out, errors)
        program = [] if words[0] == "-c" else ["-c", CONSOLE_COMMAND]
        return subprocess.Popen([sys.executable, *program, *words], stdout=out, stderr=errors)


def _read_early(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(READ_LATE)}
