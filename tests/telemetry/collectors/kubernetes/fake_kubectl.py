"""A program that takes the place of `kubectl` on PATH: answers from files in its folder, and forwards ports."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

_PROGRAM = """#!{python}
import json, os, pathlib, socket, subprocess, sys, threading

folder = pathlib.Path({folder!r})
with (folder / "calls").open("a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
failure = (folder / "failure").read_text()
if failure:
    print(failure, file=sys.stderr)
    sys.exit(1)
if "get" in sys.argv:
    print((folder / "pods.json").read_text())
    sys.exit(0)

if (folder / "plugin").exists():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
local, remote = sys.argv[-1].split(":")
server = socket.create_server(("127.0.0.1", int(local)))
print(f"Forwarding from 127.0.0.1:{{local}} -> {{remote}}", flush=True)
(folder / "pid").write_text(str(os.getpid()))


def copy(source, target):
    try:
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass


while True:
    client, _ = server.accept()
    pod = socket.create_connection(("127.0.0.1", int((folder / "port").read_text())))
    for pair in ((client, pod), (pod, client)):
        threading.Thread(target=copy, args=pair, daemon=True).start()
"""


class FakeKubectl:
    """`kubectl` on PATH for one test. Each pod's server is at `port` of this machine."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self.set_failure("")
        self.set_pods([])
        program = folder / "kubectl"
        program.write_text(_PROGRAM.format(python=sys.executable, folder=str(folder)))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def set_pods(self, pods: list[dict[str, Any]]) -> None:
        (self._folder / "pods.json").write_text(json.dumps({"items": pods}))

    def set_failure(self, text: str) -> None:
        """Let all commands fail with the message `text`, until it is set to ""."""
        (self._folder / "failure").write_text(text)

    def set_port(self, port: int) -> None:
        (self._folder / "port").write_text(str(port))

    def set_plugin(self) -> None:
        """Let each port forwarding start a program that keeps its output open, as a login plugin does."""
        (self._folder / "plugin").touch()

    @property
    def calls(self) -> list[list[str]]:
        path = self._folder / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def forwarding_pid(self) -> int:
        """Process id of the newest port forwarding; 0 before the first."""
        path = self._folder / "pid"
        return int(path.read_text() or 0) if path.exists() else 0


def pod(
    name: str, image: str = "vllm/vllm-openai:v0.33.0", *, phase: str = "Running", **container: Any
) -> dict[str, Any]:
    return {
        "metadata": {"name": name},
        "spec": {
            "containers": [{"name": "sidecar", "image": "envoy:1"}, {"name": "main", "image": image, **container}]
        },
        "status": {"phase": phase},
    }
