"""The short name of a model, as a person reads it."""

from __future__ import annotations

from typing import Final

_DEFAULT: Final = ("default", "SmolLM2-135M-Instruct")


def short_name(model: str) -> str:
    """The last part of a path or an id; the default model by its own name."""
    name = model.rstrip("/").rpartition("/")[2] or model
    return _DEFAULT[1] if name == _DEFAULT[0] else name
