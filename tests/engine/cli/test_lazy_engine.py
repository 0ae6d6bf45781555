"""The late import of the engine."""

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


def test_the_collector_rests_while_the_engine_is_imported_and_leaves_it_alone_after() -> None:
    assert subprocess.run([sys.executable, "-c", SCRIPT]).returncode == 0
