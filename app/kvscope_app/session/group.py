"""The sessions of a desktop: one for each engine or data-parallel rank, by the address that is watched.

Owns the sessions: opens them, keeps their order, closes them. What is shown of them together is a view's.
"""

from __future__ import annotations

from collections.abc import Iterator

from PySide6.QtCore import QObject, Signal

from kvscope_app.session.session import Session
from kvscope_telemetry.addresses import Address
from kvscope_telemetry.source import Source


class SessionGroup(QObject):
    """Signals are emitted on the GUI thread."""

    added = Signal(object)
    """A `Session` was opened."""
    removed = Signal(object)
    """A `Session` is about to be closed."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._sessions: list[Session] = []

    def __len__(self) -> int:
        return len(self._sessions)

    def __getitem__(self, place: int) -> Session:
        return self._sessions[place]

    def __iter__(self) -> Iterator[Session]:
        return iter(tuple(self._sessions))

    def of_source(self, source: Source) -> Session | None:
        """The session of `source`, while it is open."""
        return next((session for session in self._sessions if session.source is source), None)

    def named(self, name: str) -> Session | None:
        """The first session whose source has this name: such an address is watched already."""
        return next((session for session in self._sessions if session.source.name == name), None)

    def open(self, source: Source) -> Session:
        """A session of `source`, which it closes at its end. It takes nothing until it is started."""
        session = Session(source, self)
        self._sessions.append(session)
        self.added.emit(session)
        return session

    def watch(self, addresses: tuple[Address, ...]) -> list[Session]:
        """A session of each address, and all of them started. Raises BadInput for an address that is not accepted, and
        opens none then."""
        for address in addresses:
            address.check()
        sessions = [self.open(address.open()) for address in addresses]
        for session in sessions:
            session.start()
        return sessions

    def end(self, session: Session) -> None:
        """Close one session; does nothing for one that is not in this group."""
        if session not in self._sessions:
            return
        self.removed.emit(session)
        self._sessions.remove(session)
        session.close()
        session.deleteLater()

    def close(self) -> None:
        """Close all. Idempotent."""
        for session in self:
            self.end(session)
