"""Details below the request table: block table and events of the selected request, all events, and plots of all
requests.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from html import escape
from typing import Final

import numpy as np
from PySide6.QtCore import QSize, Qt, Signal
from PySide6.QtWidgets import QComboBox, QFrame, QHBoxLayout, QScrollArea, QTabWidget, QVBoxLayout, QWidget

from kvscope_app.session.event_log import LoggedEvent
from kvscope_app.session.session import Session
from kvscope_app.ui.theme import Theme
from kvscope_app.ui.widget_factories import label
from kvscope_app.views.events.event_model import EventFilter, EventModel
from kvscope_app.views.events.event_table import EventTable
from kvscope_app.views.requests.block_strip import BlockStrip
from kvscope_app.views.requests.blocks_text import batch_sentence, blocks_sentence
from kvscope_app.views.requests.phase_text import phases
from kvscope_app.views.requests.request_plots import RequestPlots
from kvscope_app.views.requests.reuse_text import prompt_of, reuse_text

_REQUEST_NUMBER: Final = re.compile(r"#(\d{1,10})\b")
NOTHING_SELECTED = "Select a request to see its blocks."


class RequestDetail(QTabWidget):
    """Four tabs: the selected request's blocks, its events, all events, and plots of all requests in the table."""

    request_chosen = Signal(object, object)
    """Emitted with epoch and number of a request when the user selects an event or a link that refers to it."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self.setDocumentMode(True)
        self.summary = label(look="muted", wraps=True)
        self.reuse = label(wraps=True)
        self.missed_goals_of: Callable[[int], list[str]] = lambda number: []
        """Function from request number to a text for each goal that the request missed."""
        self.delays_of: Callable[[int], tuple[str, ...]] = lambda number: ()
        """Function from request number to the request's delays as texts, oldest first."""
        self.delay_of: Callable[[int], str] = lambda number: ""
        """Function from request number to the reason for the request's delay, in one line."""
        self.delays = label(wraps=True)
        """Label with the request's delays and the goals that it missed. Request numbers are links."""
        self._shown_delays: tuple[object, ...] = ()
        self.phases = label(wraps=True)
        self.strip = BlockStrip()
        self.plots = RequestPlots()
        offset_ns = session.history.wall_ns(0)
        self.own_events = EventModel(offset_ns, self)
        self.all_events = EventModel(offset_ns, self)
        self.filter = QComboBox()
        self.filter.addItems([choice.value for choice in EventFilter])
        self.filter.setAccessibleName("Kinds of events")
        self.filter.currentTextChanged.connect(self._on_filter)
        self.tables = [
            EventTable(self.own_events, "Events of the request"),
            EventTable(self.all_events, "Events"),
        ]
        for table in self.tables:
            table.request_chosen.connect(self.request_chosen)
        self._shown_events_state: tuple[int | None, int, int] = (None, -1, -1)
        self._lay_out()

    def minimumSizeHint(self) -> QSize:
        return QSize(super().minimumSizeHint().width(), self.tabBar().sizeHint().height())

    def refresh(self) -> None:
        self._show_blocks()
        self._show_own_events()
        self._show_delays()
        self._show_phases()
        self.all_events.append_new(self._session.history.events)

    def apply_theme(self, theme: Theme) -> None:
        self.strip.apply_theme(theme)
        self.plots.apply_theme(theme)
        for model, table in zip((self.own_events, self.all_events), self.tables, strict=True):
            model.theme = theme
            table.viewport().update()

    def _show_blocks(self) -> None:
        mirror, number = self._session.mirror, self._session.selection.request
        if mirror.hello is None or number is None:
            batch = self._session.selection.batch
            self.summary.setText(batch_sentence(mirror, batch) if batch else NOTHING_SELECTED)
            empty = np.empty(0, np.int64)
            self.strip.show_blocks(empty, empty, empty, 1)
            return
        ids = mirror.requests.table(number).astype(np.int64)
        filled = mirror.ledger.filled[ids].astype(np.int64)
        cache = mirror.hello.cache
        self.strip.show_blocks(ids, filled, mirror.ledger.ref_count[ids].astype(np.int64), cache.block_size, cache)
        self.summary.setText(blocks_sentence(mirror, number))

    def _show_own_events(self) -> None:
        history, number = self._session.history, self._session.selection.request
        state = (number, history.events.num_clears, history.events.last_serial)
        if state == self._shown_events_state:
            return
        self._shown_events_state = state
        epoch = self._session.mirror.epoch
        entries = [] if number is None or epoch is None else history.events.of_request(epoch, number)
        self.own_events.show_entries(entries)
        self._show_reuse(number, entries)

    def _show_delays(self) -> None:
        session, number = self._session, self._session.selection.request
        missed_goals = [] if number is None else self.missed_goals_of(number)
        delays: tuple[str, ...] = ()
        if number is not None:
            delays = self.delays_of(number) if missed_goals else tuple(filter(None, [self.delay_of(number)]))
        state = (session.mirror.epoch, number, *missed_goals, *delays)
        if state == self._shown_delays:
            return
        self._shown_delays = state
        lines = [f"Missed: {'; '.join(missed_goals)}."] if missed_goals else []
        lines += [f"{text[0].upper()}{text[1:]}." for text in delays]
        self.delays.setText(link_requests(lines, number))
        self.delays.setVisible(bool(lines))

    def _on_link(self, target: str) -> None:
        self.request_chosen.emit(self._session.mirror.epoch, int(target))

    def _show_phases(self) -> None:
        session, number = self._session, self._session.selection.request
        shown_phases: list[tuple[str, str]] = []
        if number is not None and session.mirror.epoch is not None:
            events = [entry.event for entry in session.history.events.of_request(session.mirror.epoch, number)]
            find_first = partial(self._first_token_ns, session.mirror.epoch, number)
            shown_phases = list(phases(session.mirror, session.history.request_times, events, number, find_first))
        text = "\n".join(f"{name}: {value}" for name, value in shown_phases)
        if text != self.phases.text():
            self.phases.setText(text)
        self.phases.setVisible(bool(text))

    def _first_token_ns(self, epoch: int, number: int) -> int:
        return self._session.requests.log.first_token_ns(epoch, number)

    def _show_reuse(self, number: int | None, entries: list[LoggedEvent]) -> None:
        prompt = None if number is None else prompt_of(self._session.mirror, number)
        text = "" if number is None or prompt is None else reuse_text([e.event for e in entries], number, prompt)
        self.reuse.setText(text)
        self.reuse.setVisible(bool(text))

    def _on_filter(self, text: str) -> None:
        self.all_events.show_only(EventFilter(text), self._session.history.events)

    def _lay_out(self) -> None:
        self.setElideMode(Qt.TextElideMode.ElideNone)  # in a narrow dock, the tabs scroll
        self.addTab(self._blocks_page(), "Block table")
        self.addTab(self.tables[0], "Its events")
        self.addTab(self._all_events_page(), "All events")
        self.addTab(self.plots, "Plots")

    def _blocks_page(self) -> QWidget:
        scroll = QScrollArea()
        scroll.setAccessibleName("Blocks of the request")
        body = QWidget()
        column = QVBoxLayout(body)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        self.reuse.setContentsMargins(10, 4, 10, 4)
        self.phases.setContentsMargins(10, 2, 10, 2)
        self.delays.setContentsMargins(10, 4, 10, 4)
        self.delays.setTextFormat(Qt.TextFormat.RichText)
        self.delays.linkActivated.connect(self._on_link)
        flags = Qt.TextInteractionFlag
        for text in (self.delays, self.phases, self.reuse):
            text.setTextInteractionFlags(flags.TextSelectableByMouse)
            text.hide()
            column.addWidget(text)
        self.delays.setTextInteractionFlags(
            flags.TextSelectableByMouse | flags.LinksAccessibleByMouse | flags.LinksAccessibleByKeyboard
        )
        column.addWidget(self.strip)
        column.addStretch(1)
        scroll.setWidget(body)
        scroll.setWidgetResizable(True)
        scroll.setFrameShape(QFrame.Shape.NoFrame)
        return _column(self.summary, scroll)

    def _all_events_page(self) -> QWidget:
        bar = QWidget()
        row = QHBoxLayout(bar)
        row.setContentsMargins(0, 0, 0, 0)
        row.addWidget(self.filter)
        row.addStretch(1)
        return _column(bar, self.tables[1])


def _column(head: QWidget, body: QWidget) -> QWidget:
    page = QWidget()
    column = QVBoxLayout(page)
    column.setContentsMargins(0, 0, 0, 0)
    column.setSpacing(2)
    framed = QHBoxLayout()
    framed.setContentsMargins(10, 6, 10, 2)
    framed.addWidget(head)
    column.addLayout(framed)
    column.addWidget(body, 1)
    return page


def link_requests(lines: Iterable[str], number: int | None) -> str:
    """Return `lines` as HTML. Text such as `#7` links to request 7, except for `number` itself."""

    def link(match: re.Match[str]) -> str:
        number_text = match.group(1)
        return match.group() if int(number_text) == number else f'<a href="{int(number_text)}">#{number_text}</a>'

    return "<br>".join(_REQUEST_NUMBER.sub(link, escape(line, quote=False)) for line in lines)
