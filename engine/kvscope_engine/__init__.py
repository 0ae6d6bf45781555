"""The engine: a model on a paged KV cache that tells everything about each block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvscope_engine.config import EngineConfig
from kvscope_telemetry.messages.sampling_params import SamplingParams

if TYPE_CHECKING:
    from kvscope_engine.completion import Completion
    from kvscope_engine.engine import Engine

__all__ = ["Completion", "Engine", "EngineConfig", "SamplingParams"]

_LAZY = {"Engine": "kvscope_engine.engine", "Completion": "kvscope_engine.completion"}


def __getattr__(name: str) -> Any:
    """Import the engine, and torch with it, only when it is asked for: `--help` stays quick."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
