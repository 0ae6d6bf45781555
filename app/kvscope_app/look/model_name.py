"""What a model is called where a person reads it. Knows no Qt."""

from __future__ import annotations

from typing import Final

from kvscope_telemetry.messages.telemetry import Hello

_DEFAULT: Final = ("default", "SmolLM2-135M-Instruct")


def model_name(hello: Hello | None) -> str:
    """The last part of a path or an id; the default model by its own name; empty when there is none."""
    if hello is None:
        return ""
    name = hello.model.name.rstrip("/").rpartition("/")[2] or hello.model.name
    return _DEFAULT[1] if name == _DEFAULT[0] else name
