"""What texts ask of a session: what is shown, what is at the end, and who may be asked. Knows no view."""

from __future__ import annotations

from typing import Any, Protocol

from kvscope_app.session.kept.recorded_texts import RecordedTexts
from kvscope_telemetry.messages.commands import Command
from kvscope_telemetry.state.mirror import Mirror


class Telling(Protocol):
    """A session, as far as texts go."""

    is_file: bool
    replies: Any
    """A signal with a list of replies."""

    @property
    def mirror(self) -> Mirror: ...
    @property
    def live_mirror(self) -> Mirror: ...
    @property
    def cursor_ns(self) -> int: ...
    @property
    def recorded_texts(self) -> RecordedTexts | None: ...
    @property
    def is_viewer(self) -> bool: ...
    @property
    def tells_texts(self) -> bool: ...
    def send(self, command: Command) -> bool: ...
