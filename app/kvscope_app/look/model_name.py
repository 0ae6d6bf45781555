"""What a model is called where a person reads it. Knows no Qt."""

from __future__ import annotations

from typing import Final

from kvscope_telemetry.messages.telemetry import Hello

_DEFAULT: Final = ("default", "SmolLM2-135M-Instruct")


def model_name(hello: Hello | None) -> str:
    """The short name of its model; empty when there is none."""
    return "" if hello is None else short_name(hello.model.name)


def short_name(model: str) -> str:
    """The last part of a path or an id; the default model by its own name."""
    name = model.rstrip("/").rpartition("/")[2] or model
    return _DEFAULT[1] if name == _DEFAULT[0] else name
