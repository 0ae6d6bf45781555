"""What `WarmPython` starts: imports the engine, or what it is told, then forks itself for each process it is asked for.

Nothing was computed before it forks, and no thread of ours was started, so what it forks is as if it had imported all
by itself. It tells how many threads libraries have started: with more than one nobody should ask for a fork. Ends when
nobody can ask any more.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
from typing import Any

MAX_QUESTION_BYTES = 1 << 18


def import_all() -> None:
    """What a process that serves has imported once its model is loaded."""
    for name in ("cli.entry", "cli.main", "server.service"):
        importlib.import_module(f"kvscope_engine.{name}")
    from kvscope_engine.cli.lazy_engine import engine_class

    engine_class()


def serve(channel: socket.socket) -> list[str]:
    """Answers until there is a fork; returns in each fork, with its words."""
    answer: int | None
    while True:
        message, ends, _, _ = socket.recv_fds(channel, MAX_QUESTION_BYTES, 3)
        if not message:
            sys.exit()
        question = json.loads(message)
        if "ended" in question:
            answer = _returncode(question["ended"])
        elif "threads" in question:
            answer = len(os.listdir("/proc/self/task"))
        else:
            answer = os.fork()
            if answer == 0:
                channel.close()
                return _be(ends, **question)
            for end in ends:
                os.close(end)
        channel.send(json.dumps(answer).encode())


def _returncode(pid: int) -> int | None:
    """None while it runs."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _be(ends: list[int], words: list[str], folder: str, environment: dict[str, str]) -> list[str]:
    """Become a process of its own."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, end in enumerate(ends, 3 - len(ends)):
        os.dup2(end, number)
        os.close(end)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    return words


def run(words: list[str]) -> Any:
    """`-c`, a program and its arguments; or those of `kvscope-engine`."""
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        return exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    sys.argv = ["kvscope-engine", *words]
    from kvscope_engine.cli.entry import main

    return sys.exit(main())


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as asked:
        for name in sys.argv[2:]:
            importlib.import_module(name)
        if not sys.argv[2:]:
            import_all()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever asks ends it
        own = serve(asked)
    run(own)
