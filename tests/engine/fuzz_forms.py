"""Random structured-output requests next to a well-behaved client: how much expensive ones delay a client that only
streams.

`python tests/engine/fuzz_forms.py --count 500` starts `serve` with the default model, and measures a stream alone, then
together with clients that request no structured output ("plain"), then with clients that do ("loud"). It prints the
times between tokens, the outcomes of the structured-output requests, memory before and after, and how long SIGTERM
takes. `make test` runs a small part of it.

The engine has a small pool of blocks, which is written completely before memory is measured, because the first write of
a pool takes memory that is unrelated to structured output.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

LETTERS = "abcdefgh é€😀0123456789"
PROMPT = "Count slowly, one number after another."


def random_form(drawn: random.Random) -> dict[str, Any]:
    """Return the fields of a random structured-output request."""
    kind = drawn.choice(("regex", "regex", "schema", "grammar", "choice"))
    if kind == "regex":
        return {"guided_regex": _regex(drawn)}
    if kind == "schema":
        return {"guided_json": _schema(drawn, drawn.choice((1, 2, 3, 3, 8)))}
    if kind == "grammar":
        return {"guided_grammar": _grammar(drawn)}
    count, length = drawn.choice((2, 30, 1000)), drawn.choice((1, 20, 200))
    return {"guided_choice": [_word(drawn, length) for _ in range(count)]}


def _word(drawn: random.Random, length: int) -> str:
    return "".join(drawn.choice(LETTERS) for _ in range(length))


def _regex(drawn: random.Random) -> str:
    few, many = drawn.choice((2, 5, 20)), drawn.choice((60, 300, 2000))
    return drawn.choice(
        (
            lambda: f"(.{{1,{many}}}){{1,{few}}}" * drawn.choice((1, 2, 3)),
            lambda: f"([a-z ]{{1,{few}}}[,.]){{1,{many}}}",
            lambda: drawn.choice(("(a*)*", "(a+)+", "(a|aa)+", "(.*)*", "(a?){50}")) * drawn.choice((1, 20, 500)),
            lambda: "|".join(re.escape(_word(drawn, drawn.choice((5, 200)))) for _ in range(drawn.choice((3, 200)))),
            lambda: f"x{{{many}}}(.{{1,{few}}}){{1,60}}(.{{1,60}}){{1,60}}",
            lambda: f"[^\\x00-\\x1f]{{{few},{many}}}",
            lambda: "(" * many + "a" + ")?" * many,
            lambda: f"(\\w+\\s?){{{few},{many}}}",
            lambda: r"\d{4}-\d{2}-\d{2}",
            lambda: r"(yes|no|perhaps)( and (yes|no|perhaps)){0,3}",
        )
    )()


def _schema(drawn: random.Random, depth: int) -> Any:
    if depth == 0 or drawn.random() < 0.2:
        return drawn.choice(
            (
                lambda: {"type": "integer", "minimum": 0, "maximum": drawn.choice((9, 10**9))},
                lambda: {"type": "string", "maxLength": drawn.choice((5, 500, 20_000))},
                lambda: {"type": "string", "pattern": f"^{_regex(drawn)}$"},
                lambda: {"enum": [_word(drawn, 12) for _ in range(drawn.choice((2, 500)))]},
                lambda: {"type": "string", "format": drawn.choice(("date-time", "uri", "ipv6", "email"))},
                lambda: {"not": {}},
                lambda: {"type": ["number", "null"]},
            )
        )()
    parts = [_schema(drawn, depth - 1) for _ in range(drawn.choice((1, 3, 6)))]
    names = [f"{_word(drawn, 4)}{number}" for number in range(len(parts))]
    return drawn.choice(
        (
            {"type": "object", "properties": dict(zip(names, parts, strict=True)), "required": names[:1]},
            {"type": "array", "items": parts[0], "maxItems": drawn.choice((2, 50, 1000))},
            {"anyOf": parts},
            {"type": "object", "additionalProperties": parts[0]},
        )
    )


def _grammar(drawn: random.Random) -> str:
    deep = drawn.choice((3, 50, 500))
    chain = "\n".join(f'r{number} ::= "a" r{number + 1} | r{number + 1} "b"' for number in range(deep))
    return drawn.choice(
        (
            'root ::= "(" root ")" | root root | "x"',
            'root ::= "a" root "a" | "b" root "b" | "" ',
            f'root ::= r0\n{chain}\nr{deep} ::= "c"',
            'root ::= [a-z]+ (" " [a-z]+)* "."',
            "root ::= " + " | ".join(json.dumps(_word(drawn, 40)) for _ in range(deep)),
            f'root ::= (("a" | "b"){{1,{deep}}} "c"){{1,{deep}}}',
        )
    )


class Server:
    """`serve` as a process, with its HTTP API."""

    def __init__(self, folder: Path, options: list[str]) -> None:
        words = [sys.executable, "-m", "kvscope_engine.cli.main", "serve", "--endpoint", f"ipc://{folder}/s"]
        words += ["--http", "127.0.0.1:0", "--record", str(folder / "run.mcap"), *options]
        self.started_s = time.monotonic()
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = ""
        for line in self.process.stdout:
            if line.startswith("OpenAI API on "):
                self.url = line.split()[3].removesuffix("/v1")
                break
        while not self.is_healthy():
            assert self.process.poll() is None, "it ended"
            time.sleep(0.1)

    def is_healthy(self) -> bool:
        """Return whether `/health` succeeds."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=10) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def stream(self, seconds: float, gaps: list[float], fields: dict[str, Any] | None = None) -> None:
        """Stream one answer after another and record the seconds between tokens."""
        ends_s = time.monotonic() + seconds
        while time.monotonic() < ends_s:
            body = {"prompt": PROMPT, "max_tokens": 400, "stream": True, "ignore_eos": True, **(fields or {})}
            with self._open("/v1/completions", body) as answer:
                last_s = 0.0
                for line in answer:
                    now_s = time.monotonic()
                    if not line.startswith(b"data: {"):
                        continue
                    if last_s:
                        gaps.append(now_s - last_s)
                    last_s = now_s
                    if now_s > ends_s:
                        return

    def ask(self, fields: dict[str, Any], timeout_s: float = 300.0) -> str:
        """Send a structured-output request and return its outcome in a word or two."""
        body = {"prompt": PROMPT, "max_tokens": 16, "temperature": 1.2, **fields}
        try:
            with self._open("/v1/completions", body, timeout_s) as answer:
                answer.read()
                return "answered"
        except urllib.error.HTTPError as error:
            message = json.loads(error.read())["error"]["message"]
            words = (
                "too costly",
                "for one token",
                "not enforced",
                "not be enforced",
                "is not accepted",
                "already, and",
                "engine is behind",
            )
            return f"{error.code} {next((word for word in words if word in message), message[:60])}"
        except (OSError, TimeoutError) as error:
            return f"lost: {type(error).__name__}"

    def fill_pool(self) -> None:
        """Write every block of the pool, and let the C libraries allocate what such steps need."""
        for number in range(8):
            self.ask({"prompt": f"{number} " * 1100, "max_tokens": 2})

    def memory_mb(self) -> dict[str, int]:
        """Return the memory of all processes without page cache, shared memory counted once."""
        engine = psutil.Process(self.process.pid)
        found = {"engine": _anonymous_mb(engine.pid), "forms": 0, "other": 0}
        for process in engine.children(recursive=True):
            with contextlib.suppress(psutil.Error, OSError):
                kind = (
                    "forms" if any("structured_output.fork_server" in word for word in process.cmdline()) else "other"
                )
                found[kind] += _anonymous_mb(process.pid)
        return found | {"all": sum(found.values())}

    def stop(self) -> float:
        """Send SIGTERM and return the seconds until the process has ended."""
        started_s = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        took_s = time.monotonic() - started_s
        assert self.process.stdout is not None
        self.process.stdout.close()
        return took_s

    def _open(self, path: str, body: dict[str, Any], timeout_s: float = 300.0) -> Any:
        data = json.dumps(body).encode()
        head = {"Content-Type": "application/json"}
        return urllib.request.urlopen(urllib.request.Request(self.url + path, data, head), timeout=timeout_s)


def _anonymous_mb(pid: int) -> int:
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        sizes = {words[0]: int(words[1]) for words in map(str.split, file) if words[0].startswith("Pss_")}
    return (sizes["Pss_Anon:"] + sizes["Pss_Shmem:"]) // 1000


def percentile(values: list[float], share: float) -> float:
    """Return a percentile in milliseconds."""
    return 1e3 * sorted(values)[min(len(values) - 1, int(share * len(values)))]


@contextlib.contextmanager
def _good_client(server: Server, gaps: list[float]) -> Iterator[None]:
    """Run a well-behaved client that streams meanwhile."""
    ends = threading.Event()

    def stream() -> None:
        while not ends.is_set():
            server.stream(2.0, gaps)

    client = threading.Thread(target=stream)
    client.start()
    try:
        yield
    finally:
        ends.set()
        client.join()


def storm(server: Server, waiting: Iterator[dict[str, Any]], clients: int) -> collections.Counter[str]:
    """Send all requests from several clients concurrently and return their outcomes."""
    became: collections.Counter[str] = collections.Counter()
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                form = next(waiting, None)
            if form is None:
                return
            result = server.ask(form)
            if result.startswith("429"):
                time.sleep(1.0)
                result = server.ask(form)
            with lock:
                became[result] += 1

    threads = [threading.Thread(target=work) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return became


def run(count: int, seed: int, clients: int, quiet_s: float, options: list[str]) -> dict[str, Any]:
    """Run the whole measurement."""
    drawn = random.Random(seed)
    forms = [random_form(drawn) for _ in range(count)]
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), options)
        try:
            server.ask({"guided_regex": "warm"})
            server.fill_pool()
            server.stream(2.0, [])
            quiet: list[float] = []
            server.stream(quiet_s, quiet)
            plain: list[float] = []
            with _good_client(server, plain):
                ends_s = time.monotonic() + quiet_s
                storm(server, itertools.takewhile(lambda _: time.monotonic() < ends_s, itertools.repeat({})), clients)
            before = server.memory_mb()
            loud: list[float] = []
            started_s = time.monotonic()
            with _good_client(server, loud):
                became = storm(server, iter(forms), clients)
            lasted_s = time.monotonic() - started_s
            time.sleep(2.0)
            after = server.memory_mb()
            stuck = threading.Thread(
                target=server.ask, args=({"guided_regex": "(.{1,60}){1,60}(.{1,60}){1,60}", "max_tokens": 9},)
            )
            stuck.start()
            time.sleep(0.5)
            stop_s = server.stop()
            stuck.join()
            left = [p.pid for p in psutil.process_iter(["cmdline"]) if folder in " ".join(p.info["cmdline"] or ())]
        finally:
            if server.process.poll() is None:
                server.process.kill()
    return {
        "forms": count,
        "became": dict(became.most_common()),
        "lasted_s": round(lasted_s, 1),
        "quiet_p50_ms": round(percentile(quiet, 0.5), 1),
        "quiet_p99_ms": round(percentile(quiet, 0.99), 1),
        "plain_p50_ms": round(percentile(plain, 0.5), 1),
        "plain_p99_ms": round(percentile(plain, 0.99), 1),
        "loud_p50_ms": round(percentile(loud, 0.5), 1),
        "loud_p99_ms": round(percentile(loud, 0.99), 1),
        "loud_max_ms": round(percentile(loud, 1.0), 1),
        "gaps": len(loud),
        "memory_before_mb": before,
        "memory_after_mb": after,
        "stop_s": round(stop_s, 2),
        "left_behind": left,
    }


def main() -> int:
    """Print the result of `run`. Returns 1 if the well-behaved client was affected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--quiet-seconds", type=float, default=30.0)
    parser.add_argument("options", nargs="*", help="of serve")
    args = parser.parse_args()
    options = ["--num-gpu-blocks-override", "512", *args.options]
    found = run(args.count, args.seed, args.clients, args.quiet_seconds, options)
    print(json.dumps(found, indent=2, ensure_ascii=False))
    is_fine = found["loud_p99_ms"] < 3 * found["quiet_p99_ms"] and found["stop_s"] < 10 and not found["left_behind"]
    return 0 if is_fine else 1


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
