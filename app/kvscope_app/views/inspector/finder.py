"""Runs searches, and selects a chosen result in all views at its time.

Owns the pending selection of a block at a time that is not shown yet.
"""

from __future__ import annotations

from PySide6.QtCore import QObject

from kvscope_app.session.session import Session
from kvscope_app.views.inspector.findings import Finding, findings
from kvscope_app.views.inspector.text_search import TextSearch
from kvscope_app.views.page_map.block_facts import block_facts
from kvscope_app.views.time_navigator import TimeNavigator


class Finder(QObject):
    def __init__(self, session: Session, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.session = session
        self.texts = TextSearch(session, self)
        self._navigator = TimeNavigator(session)
        self._pending_block: tuple[int, int] | None = None
        """(epoch, block) to select when its time is shown; None if there is none."""
        session.timeline.shown.connect(self._select_pending)

    def find(self, query: str) -> list[Finding]:
        """Return the results known immediately, and start a text search, which emits `texts.found` for each match."""
        self.texts.search(query)
        return findings(query, self.session.mirror, self.session.overview)

    def choose(self, finding: Finding) -> None:
        self._pending_block = None
        if finding.block is not None and finding.time_ns is not None:
            self._pending_block = (finding.epoch, finding.block)
            self.session.timeline.go_to(finding.time_ns)
            self._select_pending(None)
        elif finding.block is not None:
            self._choose_block(finding.block)
        elif finding.time_ns is not None:
            self._navigator.choose(finding.time_ns, finding.epoch, finding.request or 0)
        elif finding.request is not None:
            self.session.selection.select_block(None)
            self.session.selection.select_request(finding.request)

    def _choose_block(self, block: int) -> None:
        mirror = self.session.mirror
        if mirror.hello is None or block >= mirror.num_rows:
            return
        facts = block_facts(mirror, block, mirror.hello.cache.block_size)
        holders = facts.holders or ((facts.owner,) if facts.owner is not None else ())
        if self.session.selection.request not in holders:
            self.session.selection.select_request(holders[0] if holders else None)
        self.session.selection.select_block(block)

    def _select_pending(self, _: object) -> None:
        self._navigator.select_pending()
        if self._pending_block is not None and self._pending_block[0] == self.session.mirror.epoch:
            block, self._pending_block = self._pending_block[1], None
            self.session.selection.select_request(None)
            self.session.selection.select_block(block)
