"""Telemetry of inference engines: messages, ledger, mirror, sources, recordings. Imports neither torch nor Qt."""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvscope_telemetry.addresses import open_source as connect
    from kvscope_telemetry.mirror.mirror import Mirror
    from kvscope_telemetry.recordings.reader import Recording
    from kvscope_telemetry.recordings.writer import RecordingWriter
    from kvscope_telemetry.source import Source, SourceState, SourceStatus, Update
    from kvscope_telemetry.sources.live_source import LiveSource

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

_MODULES: Final = {
    "LiveSource": "sources.live_source",
    "Mirror": "mirror.mirror",
    "Recording": "recordings.reader",
    "RecordingWriter": "recordings.writer",
    "Source": "source",
    "SourceState": "source",
    "SourceStatus": "source",
    "Update": "source",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first access, so that commands load only the modules that they use.

    Example: `with connect("ipc:///.../telemetry") as source:` watches the engine at that address.
    """
    if name == "connect":
        return import_module("kvscope_telemetry.addresses").open_source
    if name in _MODULES:
        return getattr(import_module(f"kvscope_telemetry.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
