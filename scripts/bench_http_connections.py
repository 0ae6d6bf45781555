"""What idle connections to the OpenAI API cost, and whether they hold up who works.

    python scripts/bench_http_connections.py [--connections 10000] [--json]

Starts `kvscope-engine http` without an engine, opens connections on which one request each was answered, and asks on
others meanwhile: memory a connection, and how long a `/version` takes without and with them; then one more connection
than are let in, and one that never ends its head.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from kvscope_engine.http.api import HttpLimits
from kvscope_telemetry.sockets.file_limit import raise_file_limit

ASK = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
WAIT_S = 60.0


def resident_bytes(pid: int) -> int:
    """Of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:"))


def asked(connection: socket.socket) -> str:
    """The first line of the answer to one more request; empty where the connection was closed."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(ASK)
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(1 << 16).partition(b"\r\n")[0].decode()
    return ""


def answered_ms(address: tuple[str, int], times: int = 200) -> float:
    """The median of a request's time on a connection of its own."""
    found = []
    for _ in range(times):
        started = time.perf_counter()
        with socket.create_connection(address, WAIT_S) as connection:
            if not asked(connection).endswith("200 OK"):
                raise SystemExit("a request was not answered")
        found.append(time.perf_counter() - started)
    return 1e3 * statistics.median(found)


@contextlib.contextmanager
def serving(limit: int) -> Iterator[tuple[int, tuple[str, int]]]:
    """The API's process and its address."""
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        words = ["http", f"ipc://{folder}", "--listen", "127.0.0.1:0", "--max-connections", str(limit), "--no-metrics"]
        command = [sys.executable, "-m", "kvscope_engine.cli.main", *words]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            host, _, port = process.stdout.readline().strip().rpartition("//")[2].rpartition(":")
            yield process.pid, (host, int(port))
        finally:
            process.terminate()
            process.wait(WAIT_S)


def measure(number: int) -> dict[str, object]:
    """All of it."""
    with serving(number + 1) as (pid, address), contextlib.ExitStack() as stack:
        alone_ms = answered_ms(address)
        before = resident_bytes(pid)
        num_answered = 0
        for _ in range(number):
            connection = stack.enter_context(socket.create_connection(address, WAIT_S))
            num_answered += asked(connection).endswith("200 OK")
        held = resident_bytes(pid) - before
        num_open = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        beside_ms = answered_ms(address)
        last = stack.enter_context(socket.create_connection(address, WAIT_S))
        last.sendall(b"GET /version HTT")  # and no more
        with socket.create_connection(address, WAIT_S) as over:
            refusal = over.recv(1 << 16).partition(b"\r\n")[0].decode()
        started = time.perf_counter()
        cut = last.recv(1 << 16).partition(b"\r\n")[0].decode()
        return {
            "connections": number,
            "answered": num_answered,
            "files_open": num_open,
            "bytes_a_connection": held // number,
            "request_ms_alone": round(alone_ms, 2),
            "request_ms_beside_them": round(beside_ms, 2),
            "beyond_the_limit": refusal,
            "half_a_head": cut,
            "half_a_head_cut_after_s": round(time.perf_counter() - started, 1),
            "half_a_head_limit_s": HttpLimits().header_s,
        }


def main() -> int:
    """Print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    raise_file_limit()
    found = measure(args.connections)
    print(json.dumps(found) if args.json else "\n".join(f"{name:26} {value}" for name, value in found.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
