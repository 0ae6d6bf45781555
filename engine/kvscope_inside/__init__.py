"""What runs inside another engine's process and tells its cache as kvscope's own engine tells its: every block, every
request, every step, to `kvscope --attach`.

It never changes what the engine computes, costs its step no more than docs/guide/inside-vllm.md says, and an
exception in it ends it and not the engine. It needs what `kvscope_telemetry` needs and nothing more; the engine's own
modules are imported inside functions alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvscope_inside.publisher import Publisher
    from kvscope_inside.transformers.watch import watch
    from kvscope_telemetry.state.cache_state import CacheState, KnownRequest

__all__ = ["CacheState", "KnownRequest", "Publisher", "watch"]

_PLACES: Final = {
    "CacheState": "kvscope_telemetry.state.cache_state",
    "KnownRequest": "kvscope_telemetry.state.cache_state",
    "Publisher": "kvscope_inside.publisher",
    "watch": "kvscope_inside.transformers.watch",
}


def __getattr__(name: str) -> Any:
    """Imported when it is asked for: a process of an engine in which nothing is watched pays for none of it."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)
