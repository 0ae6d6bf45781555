"""What an engine says about itself: messages, ledger, mirror, sources. No torch, no Qt."""

from kvscope_telemetry.live_source import LiveSource
from kvscope_telemetry.mirror import Mirror
from kvscope_telemetry.source import Source, SourceState, SourceStatus, Update

__all__ = ["LiveSource", "Mirror", "Source", "SourceState", "SourceStatus", "Update", "connect"]

connect = LiveSource
"""`with connect("ipc:///…/telemetry") as source:` watches the engine there."""
