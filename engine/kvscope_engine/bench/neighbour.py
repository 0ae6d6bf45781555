"""`kvscope-engine bench neighbour`: decoding on a CPU alone, and beside one busy process a core.

Tokens a second of our engine, of ours with a fixed number of threads, and of transformers, each in a process of its
own, one after the other in each round; medians of the rounds, ratios to quiet within a round. The neighbours have the
lowest priority (nice 19) and the normal one. Many kernels share the CPU between sessions first (autogroup): there the
priority of a program from another terminal means nothing, which is a third case.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvscope_engine.bench.measure import teller
from kvscope_engine.bench.table import table
from kvscope_telemetry.errors import BadInput, KvscopeError

MAX_LIFE_S: Final = 300
_PROGRAM: Final = """
import ctypes, os, resource, signal, sys
nice, life_s, parent = map(int, sys.argv[1:])
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
signal.alarm(life_s)
resource.setrlimit(resource.RLIMIT_CPU, (life_s, life_s))
if os.getppid() != parent:
    sys.exit("the parent has ended")
os.nice(nice)
print("busy", flush=True)
while True:
    pass
"""
QUIET: Final = "quiet"
AUTOGROUP: Final = Path("/proc/sys/kernel/sched_autogroup_enabled")
LOWEST: Final = 19
SETTLE_S: Final = 2.0
"""Decoded before each measurement: an engine that watches its neighbours has seen them by then."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One contender in one situation of one round."""

    per_second: float
    num_threads: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="rounds")
    parser.add_argument("--seconds", type=float, default=3.0, metavar="S", help="seconds of decoding in each run")
    parser.add_argument("--requests", type=int, default=1, metavar="N", help="concurrent requests")
    parser.add_argument(
        "--threads",
        type=int,
        action="append",
        metavar="N",
        help="also measure kvscope with this many threads; repeatable",
    )
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="of all contenders")
    parser.add_argument("--model", default="default", metavar="M", help="another model (skips transformers)")


def run(args: argparse.Namespace) -> int:
    """Measure and print; 0 when all ran."""
    if args.repeats < 1 or args.seconds <= 0 or args.requests < 1:
        raise BadInput("--repeats, --seconds and --requests are not accepted: each must be above 0")
    with ExitStack() as stack:
        ours, num_threads = stack.enter_context(contender_in(args, "kvscope", None))
        contenders = {"kvscope": ours}
        for count in sorted({num_threads, *(args.threads or ())}, reverse=True):
            contenders[_fixed(count)] = stack.enter_context(contender_in(args, "kvscope", count))[0]
        if args.model == "default":
            contenders["transformers"] = stack.enter_context(contender_in(args, "transformers", None))[0]
        found = _measure(contenders, args)
    report = _report(found, num_threads, args)
    print(json.dumps(report) if args.json else _text(report))
    return 0


def _fixed(num_threads: int) -> str:
    return f"kvscope, always {num_threads} {'thread' if num_threads == 1 else 'threads'}"


def _situations() -> dict[str, Callable[[], AbstractContextManager[object]]]:
    count = len(os.sched_getaffinity(0))
    made: dict[str, Callable[[], AbstractContextManager[object]]] = {
        QUIET: nullcontext,
        "lowest priority": lambda: busy_processes(count, LOWEST),
        "normal priority": lambda: busy_processes(count, 0),
    }
    if AUTOGROUP.is_file() and AUTOGROUP.read_text(encoding="ascii").strip() == "1":
        made["lowest, another session"] = lambda: busy_processes(count, LOWEST, own_session=True)
    return made


@contextmanager
def contender_in(args: argparse.Namespace, name: str, num_threads: int | None) -> Iterator[tuple[Any, int]]:
    """A process that decodes when told, and its number of threads; ended with the context."""
    command = [sys.executable, "-m", "kvscope_engine.bench.decode_child", name]
    command += ["--requests", str(args.requests), "--dtype", args.dtype, "--model", args.model]
    command += [] if num_threads is None else ["--threads", str(num_threads)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(seconds: float | None) -> dict[str, float]:
        assert process.stdin is not None, "a contender's input is a pipe"
        assert process.stdout is not None, "a contender's output is a pipe"
        if seconds is not None:
            process.stdin.write(f"{seconds}\n")
            process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise KvscopeError(f"{name} ended before it was measured: exit code {process.wait()}")
        answer: dict[str, float] = json.loads(line)
        return answer

    try:
        yield ask, int(ask(None)["threads"])
    finally:
        process.kill()
        process.communicate()


def _measure(contenders: dict[str, Any], args: argparse.Namespace) -> dict[str, dict[str, list[Measured]]]:
    """By situation and contender, one number a round."""
    tell = teller(args.json)
    found: dict[str, dict[str, list[Measured]]] = {
        situation: {name: [] for name in contenders} for situation in _situations()
    }
    for round_ in range(args.repeats):
        for situation, neighbours in _situations().items():
            for name, ask in contenders.items():
                tell(f"round {round_ + 1} of {args.repeats}, {situation}: {name}")
                with neighbours():
                    ask(min(SETTLE_S, args.seconds))
                    answer = ask(args.seconds)
                rate = answer["tokens"] / answer["seconds"]
                found[situation][name].append(Measured(rate, int(answer["threads"])))
    tell("")
    return found


def _report(found: dict[str, dict[str, list[Measured]]], num_threads: int, args: argparse.Namespace) -> dict[str, Any]:
    fixed = found[QUIET][_fixed(num_threads)]
    return {
        "num_threads": num_threads,
        "requests": args.requests,
        "num_neighbours": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "situations": {
            situation: {name: _summary(rounds, found[QUIET][name]) for name, rounds in contenders.items()}
            for situation, contenders in found.items()
        },
        "quiet_over_fixed_threads": _ratio(found[QUIET]["kvscope"], fixed),
    }


def _summary(rounds: Sequence[Measured], quiet: Sequence[Measured]) -> dict[str, float]:
    return {
        "tokens_per_second": statistics.median(one.per_second for one in rounds),
        "of_quiet": _ratio(rounds, quiet),
        "num_threads": statistics.median_low(one.num_threads for one in rounds),
    }


def _ratio(ours: Sequence[Measured], theirs: Sequence[Measured]) -> float:
    return statistics.median(a.per_second / b.per_second for a, b in zip(ours, theirs, strict=True))


def _text(report: dict[str, Any]) -> str:
    rows = [
        [situation, name, f"{row['tokens_per_second']:.1f}", f"{row['of_quiet']:.2f}", f"{row['num_threads']}"]
        for situation, contenders in report["situations"].items()
        for name, row in contenders.items()
    ]
    heading = (
        f"{report['requests']} at a time on {report['num_threads']} CPU threads, beside {report['num_neighbours']} busy"
        f" processes; load average {report['load_average']:.1f}\n"
    )
    share = report["quiet_over_fixed_threads"]
    last = f"\nquiet, ours over a fixed number of threads: {share:.3f} x"
    return "\n".join([heading, table(["neighbours", "", "tokens/s", "of quiet", "threads"], rows), last])


@contextmanager
def busy_processes(count: int, nice: int, *, own_session: bool = False) -> Iterator[tuple[int, ...]]:
    """Busy neighbours: processes that do nothing but use a core each, and never outlive what they are beside.

    The kernel ends them with the thread that started them, and a clock after `MAX_LIFE_S` at the latest.

    `count` processes that are busy, `nice` steps below this one's priority, until the context ends; their ids.

    `own_session`: each is in a session of its own, as a program from another terminal is. Where the kernel groups by
    session (autogroup) their priority then means nothing beside this process.
    """
    processes = [_start(nice, own_session) for _ in range(count)]
    try:
        for process in processes:
            assert process.stdout is not None, "a neighbour's output is a pipe"
            process.stdout.readline()
        yield tuple(process.pid for process in processes)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.communicate()


def _start(nice: int, own_session: bool) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-S", "-c", _PROGRAM, *map(str, (nice, MAX_LIFE_S, os.getpid()))]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=own_session)
