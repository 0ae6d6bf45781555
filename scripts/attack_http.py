"""A good HTTP client's first token while others ask for too much: each attack on a new `kvscope-engine serve --http`.

    python scripts/attack_http.py [--model M] [--times 5] [--only NAME] [--max-tokens N] [--same-address] [--json]

The good client streams a short completion, again and again, from an address of its own (127.0.0.2); with
`--same-address` from that of the attackers, as behind one proxy. Printed are its median and worst time to the first
token, what the attackers were answered by then, and the memory of both processes before and at most.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

GOOD: Final = "127.0.0.2"
EVIL: Final = "127.0.0.1"
PATIENCE_S: Final = 120.0
SLOW_FORM: Final = "(.{1,60}){1,60}(.{1,60}){1,60}"
Bodies = list[dict[str, Any]]


def attacks(max_tokens: int) -> dict[str, Bodies]:
    """Bodies of completions by name, all sent at once."""
    prompts = [f"Tell a long story about the number {number}." for number in range(256)]
    some: dict[str, Any] = {"max_tokens": max_tokens}
    return {
        "nothing": [],
        "128 prompts x n = 63, twice": [{"prompt": prompts[:128], "n": 63, "temperature": 1} | some] * 2,
        "30 prompts of 600,000 emoji": [{"prompt": "\U0001f600" * 600_000} | some] * 30,
        "20 slow forms": [{"prompt": "x", "guided_regex": f"{SLOW_FORM}{number}"} | some for number in range(20)],
        "256 x 64 at once": [{"prompt": prompts, "n": 64, "temperature": 1} | some],
        "256 requests of n = 32": [{"prompt": prompt, "n": 32, "temperature": 1} | some for prompt in prompts],
    }


class Server:
    """One `serve --http`, from its start to its end."""

    def __init__(self, model: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kv-")
        with socket.create_server((EVIL, 0)) as free:
            self.port: int = free.getsockname()[1]
        words = ["serve", "--model", model, "--endpoint", f"ipc://{self._folder.name}", "--http", f"{EVIL}:{self.port}"]
        self._log = (Path(self._folder.name) / "log").open("w+")
        command = [sys.executable, "-m", "kvscope_engine.cli.main", *words]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        self._http_pid = 0
        deadline = time.monotonic() + 300
        while first_token(self, GOOD, 2.0) is None:
            if time.monotonic() > deadline or self._process.poll() is not None:
                self._log.seek(0)
                raise SystemExit(f"the engine does not get ready: {self._log.read()[-500:]}")
            time.sleep(0.2)

    def memory_mb(self, field: str) -> dict[str, int]:
        """`VmRSS` now or `VmHWM` at most, of both processes."""
        return {name: _status_mb(pid, field) for name, pid in (("engine", self._process.pid), ("http", self._http()))}

    def close(self) -> float:
        """Seconds that an orderly end took."""
        started = time.monotonic()
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        self._process.kill()
        self._process.wait()
        self._log.close()
        self._folder.cleanup()
        return time.monotonic() - started

    def _http(self) -> int:
        if not self._http_pid:
            tasks = Path(f"/proc/{self._process.pid}/task").glob("*/children")
            pids = [int(pid) for task in tasks for pid in task.read_text().split()]
            self._http_pid = next(p for p in pids if b"--listen-fd" in Path(f"/proc/{p}/cmdline").read_bytes())
        return self._http_pid


def _status_mb(pid: int, field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) // 1024 if found else 0


def post(server: Server, address: str, body: dict[str, Any], timeout_s: float) -> socket.socket:
    """A connection from `address` on which it was sent."""
    connection = socket.create_connection((EVIL, server.port), timeout_s, source_address=(address, 0))
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    connection.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data)
    return connection


def first_token(server: Server, address: str, patience_s: float = PATIENCE_S) -> float | None:
    """Seconds to the good client's first token; None when it did not come."""
    started = time.monotonic()
    body = {"prompt": f"The time is {started}, and", "max_tokens": 8, "stream": True, "ignore_eos": True}
    heard = b""
    with suppress(OSError), post(server, address, body, patience_s) as connection:
        while b'"text":' not in heard:
            more = connection.recv(1 << 16)
            if not more:
                return None
            heard += more
        taken = time.monotonic() - started
        while connection.recv(1 << 16):
            pass
        return taken
    return None


def attack(server: Server, body: dict[str, Any], answers: Counter[str]) -> None:
    """Send it and hear what becomes of it, to the end."""
    heard = b""
    with suppress(OSError), post(server, EVIL, body, 600) as connection:
        while more := connection.recv(1 << 20):
            heard = (heard + more)[:64]
    answers[heard[9:12].decode() or "no answer"] += 1


def measure(name: str, bodies: Bodies, args: argparse.Namespace) -> dict[str, Any]:
    """One attack."""
    server = Server(args.model)
    try:
        for _ in range(2):
            first_token(server, GOOD)
        before, answers = server.memory_mb("VmRSS"), Counter[str]()
        threads = [threading.Thread(target=attack, args=(server, body, answers), daemon=True) for body in bodies]
        for thread in threads:
            thread.start()
        time.sleep(args.after if bodies else 0)
        times = [first_token(server, EVIL if args.same_address else GOOD) for _ in range(args.times)]
        still_under_way, answered = sum(thread.is_alive() for thread in threads), dict(answers)
        peak = server.memory_mb("VmHWM")
    finally:
        end_s = server.close()
    came = [one for one in times if one is not None]
    return {
        "attack": name,
        "ttft_median_s": round(statistics.median(came), 2) if came else None,
        "ttft_worst_s": round(max(came), 2) if len(came) == len(times) else None,
        "attackers_answered": answered,
        "attackers_under_way": still_under_way,
        "mb_before": before,
        "mb_at_most": peak,
        "end_s": round(end_s, 1),
    }


def main() -> int:
    """Print a line an attack; 1 when a first token took 5 s or more."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--times", type=int, default=5, help="first tokens of the good client, an attack")
    parser.add_argument("--max-tokens", type=int, default=256, help="that attackers ask for")
    parser.add_argument(
        "--after", type=float, default=1.0, help="seconds that attackers have before the good client comes"
    )
    parser.add_argument("--only", default="", help="attacks whose name has this in it")
    parser.add_argument("--same-address", action="store_true", help="the good client shares the attackers'")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    is_good = True
    for name, bodies in attacks(args.max_tokens).items():
        if args.only in name:
            found = measure(name, bodies, args)
            worst = found["ttft_worst_s"]
            is_good &= worst is not None and worst < 5.0
            print(json.dumps(found) if args.json else _line(found), flush=True)
    return 0 if is_good else 1


def _line(found: dict[str, Any]) -> str:
    memory = ", ".join(f"{who} {found['mb_before'][who]} to {mb} MB" for who, mb in found["mb_at_most"].items())
    answers = ", ".join(f"{count} x {status}" for status, count in found["attackers_answered"].items())
    left = f"{found['attackers_under_way']} under way" if found["attackers_under_way"] else ""
    attackers = ", ".join(filter(None, (answers, left))) or "none"
    return (
        f"{found['attack']:30} first token {found['ttft_median_s']} s, worst {found['ttft_worst_s']} s;"
        f" attackers: {attackers}; {memory}; ended in {found['end_s']} s"
    )


if __name__ == "__main__":
    sys.exit(main())
