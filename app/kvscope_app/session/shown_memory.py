"""Memory breakdown at the shown time, even if the engine had not yet sent one at that time. Imports no Qt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvscope_telemetry.messages.telemetry import MemoryBreakdown

if TYPE_CHECKING:
    from kvscope_app.session.source_timeline import SourceTimeline


def shown_memory(timeline: SourceTimeline) -> MemoryBreakdown | None:
    """Return the newest memory breakdown at the shown time, or None.

    Before an engine sends its first breakdown after a start, for example right after attaching, return only the parts
    that are constant within an engine start (weights and pool), from the newest breakdown at the live end.
    """
    shown, newest = timeline.history.memory, timeline.end.history.memory
    if shown is not None or newest is None or newest.epoch != timeline.mirror.epoch:
        return shown
    return MemoryBreakdown(
        epoch=newest.epoch,
        time_ns=newest.time_ns,
        weights_bytes=newest.weights_bytes,
        kv_bytes=newest.kv_bytes,
        modules=newest.modules,
        ranks=newest.ranks,
        host_weights_bytes=newest.host_weights_bytes,
    )
