"""Display name of a model. Imports no Qt."""

from __future__ import annotations

from kvscope_telemetry.messages.model_names import short_name
from kvscope_telemetry.messages.telemetry import Hello


def model_name(hello: Hello | None) -> str:
    """Return the short name of the engine's model, or "" if `hello` is None."""
    return "" if hello is None else short_name(hello.model.name)
