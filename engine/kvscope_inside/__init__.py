"""What runs inside another engine's process and tells its cache as kvscope's own engine tells its: every block, every
request, every step, to `kvscope --attach`.

It never changes what the engine computes, costs its step no more than docs/guide/inside-other-engines.md says, and an
exception in it ends it and not the engine. It needs what `kvscope_telemetry` needs and nothing more; the engine's own
modules are imported inside functions alone.
"""

from kvscope_inside.cache_state import CacheState, KnownRequest
from kvscope_inside.publisher import Publisher

__all__ = ["CacheState", "KnownRequest", "Publisher"]
