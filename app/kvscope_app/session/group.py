"""The open sessions of the desktop: one per watched engine or data-parallel rank.

Opens the sessions, keeps their order and closes them. Views decide how to show several sessions together.
"""

from __future__ import annotations

from collections.abc import Iterator

from PySide6.QtCore import QObject, Signal

from kvscope_app.session.session import Session
from kvscope_telemetry.addresses import Address
from kvscope_telemetry.source import Source


class SessionGroup(QObject):
    added = Signal(object)
    """Emitted with a `Session` after it was opened."""
    removed = Signal(object)
    """Emitted with a `Session` before it is closed."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._sessions: list[Session] = []

    def __len__(self) -> int:
        return len(self._sessions)

    def __getitem__(self, index: int) -> Session:
        return self._sessions[index]

    def __iter__(self) -> Iterator[Session]:
        return iter(tuple(self._sessions))

    def find_by_source(self, source: Source) -> Session | None:
        return next((session for session in self._sessions if session.source is source), None)

    def find_by_name(self, name: str) -> Session | None:
        """Return the first session with a source of this name, or None.

        Used to detect an address that is already watched.
        """
        return next((session for session in self._sessions if session.source.name == name), None)

    def open(self, source: Source) -> Session:
        """Create a session for `source`, which the session closes. It applies no updates before `Session.start`."""
        session = Session(source, self)
        self._sessions.append(session)
        self.added.emit(session)
        return session

    def open_addresses(self, addresses: tuple[Address, ...]) -> list[Session]:
        """Open and start a session for each address. Raises BadInput, and opens none, if any address is invalid."""
        for address in addresses:
            address.check()
        sessions = [self.open(address.open()) for address in addresses]
        for session in sessions:
            session.start()
        return sessions

    def close_session(self, session: Session) -> None:
        """Close one session. Does nothing if the session is not in this group."""
        if session not in self._sessions:
            return
        self.removed.emit(session)
        self._sessions.remove(session)
        session.close()
        session.deleteLater()

    def close(self) -> None:
        """Close all sessions. Idempotent."""
        for session in self:
            self.close_session(session)
