"""Run everything that needs a GPU as one session with a time budget: tests, then measurements by importance.

Each part is a command with a budget of its own, and prints while it runs. A part that fails or exceeds its budget does
not stop the others. At the end, a table shows how each part ended. The 8B model has random weights, so nothing is
downloaded. --rehearse runs the measurements with a tiny setting on the CPU, to see that they run at all.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.command_line import run_benchmark
from kvscope_engine.text_table import table
from kvscope_telemetry.errors import BadInput

MIN_SECONDS: Final = 15
"""Remaining seconds of the session below which no further part starts."""
REHEARSAL_SECONDS: Final = 600
_ROOT: Final = Path(__file__).parents[1]
_REHEARSAL: Final = "--device cpu --shape 135m --batch 1 --context 32 --steps 2 --no-eager --gpu-memory-utilization 0.1"


@dataclass(frozen=True, slots=True)
class SessionPart:
    name: str
    seconds: int
    """Time budget on a GPU like an H100 or H200."""
    options: str
    """Arguments of `kvscope-engine bench gpu`; "" for tests/gpu.sh."""
    rehearsal: str | None
    """The arguments of a rehearsal; None if a rehearsal skips the part."""

    def command(self, is_rehearsal: bool) -> list[str]:
        if not self.options:
            return ["sh", str(_ROOT / "tests" / "gpu.sh")]
        options = self.rehearsal if is_rehearsal else self.options
        assert options is not None, f"{self.name} has no rehearsal"
        return [sys.executable, "-m", "kvscope_engine.cli.main", "bench", "gpu", *options.split()]


PARTS: Final = (
    SessionPart("tests", 300, "", None),
    SessionPart(
        "8b",
        150,
        "--shape 8b --no-eager --sampling greedy --sampling top-p --with quantization=int4 --with quantization=fp8",
        f"{_REHEARSAL} --sampling greedy --sampling top-p --with quantization=int8",
    ),
    SessionPart("8b-first-token", 80, "--shape 8b --ttft --with no-piecewise-graphs", None),
    SessionPart("8b-requests", 90, "--shape 8b --requests 256 --limit 45", f"{_REHEARSAL} --requests 2 --limit 20"),
    SessionPart(
        "135m",
        70,
        "--shape 135m --sampling greedy --sampling top-p --with no-piecewise-graphs",
        f"{_REHEARSAL} --with no-async-scheduling",
    ),
    SessionPart(
        "8b-heat", 60, "--shape 8b --no-eager --batch 16 --with page-heat=16", f"{_REHEARSAL} --with page-heat=2"
    ),
    SessionPart("moe", 70, "--shape 30b-a3b --no-eager --batch 1 --batch 16", None),
    SessionPart("telemetry", 40, "--shape 8b --telemetry", f"{_REHEARSAL} --telemetry"),
)
"""In order of importance. Recurrent states, latents, experts, LoRA, swaps and determinism are among the tests."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(part.name for part in PARTS)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{names} (default: all)")
    parser.add_argument("--seconds", type=int, default=840, metavar="S", help="time budget of all parts (default: 840)")
    parser.add_argument("--rehearse", action="store_true", help="tiny measurements on the CPU, without tests")


def run(args: argparse.Namespace) -> int:
    """Run the chosen parts. Returns 1 if one failed or was cut. Raises BadInput for an unknown part."""
    names = {part.name for part in PARTS}
    if unknown := [name for name in args.parts if name not in names]:
        raise BadInput(f"there is no part {unknown[0]}; there are {', '.join(part.name for part in PARTS)}")
    rows: list[list[str]] = []
    end_s = time.monotonic() + args.seconds
    for part in PARTS:
        if args.parts and part.name not in args.parts:
            continue
        started_s = time.monotonic()
        result = _run_part(part, end_s, args.rehearse)
        rows.append([part.name, result, f"{time.monotonic() - started_s:.0f}"])
        print(f"-- {part.name}: {result}", flush=True)
    print("\n" + table(["part", "result", "seconds"], rows))
    return 1 if any(result.startswith(("FAILED", "cut")) for _, result, _ in rows) else 0


def _run_part(part: SessionPart, end_s: float, is_rehearsal: bool) -> str:
    """Run a part and return how it ended."""
    if is_rehearsal and part.rehearsal is None:
        return "skipped: not part of a rehearsal"
    budget_s = REHEARSAL_SECONDS if is_rehearsal else part.seconds
    limit_s = min(budget_s, end_s - time.monotonic())
    if limit_s < MIN_SECONDS:
        return "skipped: the session's time is over"
    command = part.command(is_rehearsal)
    print(f"\n== {part.name}, at most {limit_s:.0f} s: {' '.join(command)}", flush=True)
    environment = os.environ | {"KVSCOPE_GPU_SECONDS": str(int(limit_s))}
    # Its own process group, so that its child processes end with it.
    process = subprocess.Popen(command, cwd=_ROOT, env=environment, start_new_session=True)
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"cut after {limit_s:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return "passed" if code == 0 else f"FAILED: exit status {code}"


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__, add_arguments, run))
