"""What a model is called where a person reads it. Knows no Qt."""

from __future__ import annotations

from kvscope_telemetry.messages.model_names import short_name
from kvscope_telemetry.messages.telemetry import Hello


def model_name(hello: Hello | None) -> str:
    """The short name of its model; empty when there is none."""
    return "" if hello is None else short_name(hello.model.name)
