"""Inference engine: runs a model on a paged KV cache and publishes the state of each block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvscope_engine.completion import Completion
    from kvscope_engine.engine import Engine
    from kvscope_telemetry.engine_config import EngineConfig
    from kvscope_telemetry.messages.sampling_params import SamplingParams

__all__ = ["Completion", "Engine", "EngineConfig", "SamplingParams"]

_LAZY = {
    "Engine": "kvscope_engine.engine",
    "EngineConfig": "kvscope_telemetry.engine_config",
    "Completion": "kvscope_engine.completion",
    "SamplingParams": "kvscope_telemetry.messages.sampling_params",
}


def __getattr__(name: str) -> Any:
    """Import an exported name on first access, so that `--help` and Ctrl-C do not wait for torch."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
