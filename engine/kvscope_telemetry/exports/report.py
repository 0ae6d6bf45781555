"""x"""

from __future__ import annotations

from typing import Any


def write_report(*args: Any) -> None:
    pass
