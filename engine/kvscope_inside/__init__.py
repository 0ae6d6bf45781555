"""Publishes the KV cache of an engine that is not kvscope's own (vLLM, SGLang, transformers) from inside that engine's
process.

Every block, request and step is published, in the messages that kvscope's own engine also sends, for clients such as
`kvscope --attach`. The package never changes what the engine computes; docs/guide/inside-vllm.md states its costs per
step. An exception in the package ends the publishing and not the engine. Its only dependencies are those of
`kvscope_telemetry`; the host engine's modules are imported inside functions only.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvscope_inside.publisher import Publisher
    from kvscope_inside.transformers.transformers_watch import watch
    from kvscope_telemetry.producer.cache_state import CacheState, KnownRequest

__all__ = ["CacheState", "KnownRequest", "Publisher", "watch"]

_MODULES: Final = {
    "CacheState": "kvscope_telemetry.producer.cache_state",
    "KnownRequest": "kvscope_telemetry.producer.cache_state",
    "Publisher": "kvscope_inside.publisher",
    "watch": "kvscope_inside.transformers.transformers_watch",
}


def __getattr__(name: str) -> Any:
    """Import exported names on first use, so that processes of an engine that is not watched do not load them."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
