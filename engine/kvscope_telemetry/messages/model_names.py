"""Short display names of models."""

from __future__ import annotations

from typing import Final

_DEFAULT: Final = ("default", "SmolLM2-135M-Instruct")


def short_name(model: str) -> str:
    """Return the last part of a path or repository id; for "default", the full name of the default model."""
    name = model.rstrip("/").rpartition("/")[2] or model
    return _DEFAULT[1] if name == _DEFAULT[0] else name
