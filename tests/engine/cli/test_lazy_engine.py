"""Importing the engine late."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import gc, sys
from kvscope_engine.cli.lazy_engine import engine_class
assert "torch" not in sys.modules
assert engine_class().__name__ == "Engine"
assert gc.isenabled()
assert gc.get_freeze_count() > 100_000
gc.disable()
engine_class()
assert not gc.isenabled()
"""


def test_garbage_collector_is_off_only_during_the_import_of_the_engine() -> None:
    assert subprocess.run([sys.executable, "-c", SCRIPT]).returncode == 0
