"""The command that starts a simulated engine as a process, from any folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
"""Folder from which `tests` can be imported."""
_PROGRAM = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.simulated_engine.__main__ import main; main()"
COMMAND: Final = [sys.executable, "-c", _PROGRAM]
"""Its options follow: see `__main__.py`."""
