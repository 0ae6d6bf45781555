"""What an engine says about itself: messages, ledger, mirror, sources, recordings. No torch, no Qt."""

from typing import TYPE_CHECKING, Any

from kvscope_telemetry.addresses import open_source
from kvscope_telemetry.source import Source, SourceState, SourceStatus, Update
from kvscope_telemetry.sources.live_source import LiveSource
from kvscope_telemetry.state.mirror import Mirror

if TYPE_CHECKING:
    from kvscope_telemetry.recordings.reader import Recording
    from kvscope_telemetry.recordings.writer import RecordingWriter

__all__ = [
    "LiveSource",
    "Mirror",
    "Recording",
    "RecordingWriter",
    "Source",
    "SourceState",
    "SourceStatus",
    "Update",
    "connect",
]

connect = open_source
"""`with connect("ipc:///…/telemetry") as source:` watches the engine there; `vllm://HOST:PORT` as well."""


def __getattr__(name: str) -> Any:
    """Recordings on demand: who only watches does not pay for importing mcap and its compressors."""
    if name == "Recording":
        from kvscope_telemetry.recordings.reader import Recording

        return Recording
    if name == "RecordingWriter":
        from kvscope_telemetry.recordings.writer import RecordingWriter

        return RecordingWriter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
