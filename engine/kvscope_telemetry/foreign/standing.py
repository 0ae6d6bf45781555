"""How an attached engine is, in one state and one sentence: the worst of its two parts, metrics and KV events."""

from __future__ import annotations

from dataclasses import dataclass

from kvscope_telemetry.kv_events.stream_items import StreamState, StreamStatus
from kvscope_telemetry.source import SourceState


@dataclass(frozen=True, slots=True)
class Parts:
    """What is known of both at one moment."""

    product: str
    """The engine, as a person calls it."""
    metrics_why: str
    """Why there are none; empty while there are."""
    is_refused: bool
    events: StreamStatus | None
    """None where no endpoint is known."""
    events_failure: str
    """Why their endpoint cannot be used; empty while it can."""
    has_begun: bool
    """Whether there is a state to show."""
    are_restarts_doubtful: bool = False


def standing(parts: Parts) -> tuple[SourceState, str]:
    """State, and why in words; empty where all is well and known."""
    metrics, events = parts.metrics_why, _events_why(parts)
    if parts.is_refused:
        return SourceState.REFUSED, metrics
    if not parts.has_begun:
        return SourceState.CONNECTING, _joined(metrics, events if parts.events is not None else "")
    if metrics and events:
        return SourceState.STALE, _joined(metrics, events)
    if metrics:
        return SourceState.STALE, f"{metrics}; KV events go on" if parts.events is not None else metrics
    if _are_events_gone(parts):
        return SourceState.STALE, f"{events}; metrics go on"
    if parts.are_restarts_doubtful:
        doubt = "its counters go up and down: are there several engines behind this address?"
        return SourceState.LIVE, _joined(doubt, events)
    return SourceState.LIVE, events


def _are_events_gone(parts: Parts) -> bool:
    return bool(parts.events_failure) or (parts.events is not None and parts.events.state is StreamState.LOST)


def _events_why(parts: Parts) -> str:
    """What a person must know of them; empty where they are live."""
    events = parts.events
    if parts.events_failure:
        return f"KV events: {parts.events_failure}"
    if events is None:
        return (
            f"no KV events: {parts.product} does not say where they are, and none was given (--kv-events "
            "tcp://HOST:5557), so that which blocks are cached is not known"
        )
    if events.state is StreamState.UNCERTAIN:
        return f"what is cached is uncertain: {events.why}"
    if events.state is StreamState.REPLAYING:
        return f"what was cached before is being asked for: {events.why}"
    if events.state is StreamState.JOINING and not events.why.startswith("nothing was published"):
        return f"KV events: {events.why}"
    return f"KV events: {events.why}" if events.state is StreamState.LOST else ""


def _joined(*parts: str) -> str:
    return "; ".join(filter(None, parts))
