"""A small part of `fuzz_commands.py`; everything with KVSCOPE_SOAK=1."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "fuzz_commands.py"
COUNT, SEED = (1_000_000, 1) if os.environ.get("KVSCOPE_SOAK") else (10_000, 2)


@pytest.mark.timeout(1_200)
def test_mutated_commands_affect_neither_the_engine_nor_other_clients() -> None:
    """The line of figures names the seed; faults are in standard error."""
    command = [sys.executable, str(SCRIPT), "--count", str(COUNT), "--seed", str(SEED), "--quiet-seconds", "0.2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert f"seed {SEED}: " in done.stdout
