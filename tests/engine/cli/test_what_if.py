"""`kvscope-engine what-if` as a process: light, quick to start, and ended with its input."""

from __future__ import annotations

import json
import os
import subprocess
import sys

COMMAND = [sys.executable, "-m", "kvscope_engine.cli.main", "what-if"]
LINES = '{"setup": {"num_blocks": 64, "block_size": 16, "max_model_len": 256}}\n{"now": [[1, 20, 40, 10]]}\n'
MAX_START = 8
"""Maximum start time as a multiple of an interpreter with numpy; with torch it would be about 20."""


def test_what_if_command_answers_and_exits_when_its_input_ends() -> None:
    run = subprocess.run(COMMAND, input=LINES, capture_output=True, text=True, check=True)
    (answer,) = map(json.loads, run.stdout.splitlines())
    assert [use["allocator"] for use in answer["policies"]][:2] == ["contiguous", "buddy"]
    assert run.stderr == ""


def test_what_if_command_answers_a_line_before_its_input_ends() -> None:
    with subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(LINES)
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["policies"][0]["slots_per_cell"] == 1
        process.stdin.close()
        assert process.wait(120) == 0


def test_what_if_command_starts_quickly_and_does_not_import_torch() -> None:
    probe = (
        "import io, sys, kvscope_engine.cli.main\n"
        "from kvscope_engine.simulator.what_if.line_protocol import answer_lines\n"
        f"answer_lines(io.BytesIO({LINES.encode()!r}), io.BytesIO())\n"
        "print(' '.join(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert {"torch", "triton", "transformers"}.isdisjoint(run.stdout.split())
    usual_s = min(cpu_seconds("import numpy") for _ in range(3))
    assert min(cpu_seconds(probe) for _ in range(3)) < MAX_START * usual_s, (
        "best of three, because the machine is shared"
    )


def cpu_seconds(code: str) -> float:
    """Return the CPU seconds of a fresh interpreter that runs `code`."""
    before_s = os.times().children_user
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    return os.times().children_user - before_s
