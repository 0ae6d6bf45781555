"""The recordings of the neighbouring room."""

from tests.telemetry.recordings.conftest import make_messages, record

__all__ = ["make_messages", "record"]
