"""View of all facts about the selected block, the selected request or the current step, with the block's history.

Owns the choice between block, request and step. The session owns the selection.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import ClassVar, Final

from PySide6.QtCore import QObject, Qt
from PySide6.QtWidgets import QHBoxLayout, QSplitter, QStackedLayout, QVBoxLayout, QWidget

from kvscope_app.session.block_texts.request_text import text_blocks, text_parts
from kvscope_app.session.recording.recorded_lookup import RecordedLookup
from kvscope_app.session.session import Session
from kvscope_app.ui.theme import Theme, owner_color
from kvscope_app.ui.widget_factories import empty_state, head_row, label, set_icon, tool_button
from kvscope_app.ui.widgets import ElidedLabel, SegmentedControl
from kvscope_app.ui.zoom import scaled
from kvscope_app.views.base import View
from kvscope_app.views.inspector.block_history_panel import BlockHistoryPanel
from kvscope_app.views.inspector.block_page import block_page
from kvscope_app.views.inspector.event_facts import event_facts
from kvscope_app.views.inspector.fact_table import FactTable
from kvscope_app.views.inspector.facts import Fact, FactsPage, Link, LinkTarget
from kvscope_app.views.inspector.phase_strip import PhaseStrip
from kvscope_app.views.inspector.request_page import request_page, wall_offset_ns
from kvscope_app.views.inspector.step_page import Series, newest_timings, step_page
from kvscope_app.views.page_map.block_facts import block_facts
from kvscope_app.views.requests.request_rows import at_moment
from kvscope_app.views.roofline.step_facts import phases_of
from kvscope_app.views.visibility import is_on_screen
from kvscope_telemetry.messages.telemetry import Frame
from kvscope_telemetry.recordings.read_budget import OpeningCancelled, ProgressCallback
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.source import Update

_READ_BEFORE_S: Final = 2.0
_READ_AFTER_S: Final = 0.5
FrameKey = tuple[int, int]
BLOCK, REQUEST, STEP = range(3)
EMPTY_TEXTS: Final = (
    "No block selected.\nClick one in the page map, or find it by number (Ctrl+F).",
    "No request selected.\nClick one in the table, timeline or page map, or find it (Ctrl+F).",
    "No step has run yet.",
)
MISSING_TEXTS: Final = (
    "This block does not exist at this time.",
    "Nothing is known about this request at this time.\nIts events and the timeline show when it ran.",
    EMPTY_TEXTS[STEP],
)
_PAUSE_FIRST: Final = "pause (Space) to list them"


class InspectorView(View):
    title: ClassVar[str] = "Inspector"
    object_name: ClassVar[str] = "inspector"
    refresh_hz: ClassVar[float] = 8.0

    def __init__(self, session: Session, parent: QWidget | None = None) -> None:
        super().__init__(session, parent)
        self.subject = BLOCK
        self.subjects = SegmentedControl(["Block", "Request", "Step"], "Show")
        self.copy_button = tool_button("Copy", "Copy all rows as tab-separated text (Ctrl+C in the table)")
        self.heading = ElidedLabel()
        self.heading.setProperty("look", "heading")
        self.table = FactTable()
        self.strip = PhaseStrip()
        self.block_history = BlockHistoryPanel(session)
        self.steps = StepReader(session, self)
        self._swatch = label()
        self.empty_label = empty_state(EMPTY_TEXTS[BLOCK])
        self._newest: Series = {}
        self._selected: tuple[int | None, int | None] = (None, None)
        self._lay_out()
        self._connect()
        self._on_selection()  # apply the selection made before this view existed
        self.setFocusProxy(self.table)

    def show_subject(self, subject: int) -> None:
        self.subject = subject
        self.subjects.set_current(subject)
        self.refresh()

    def refresh(self) -> None:
        page = self._page()
        is_block = page is not None and self.subject == BLOCK
        if is_block or self.session.selection.block != self.block_history.history.block:
            self.block_history.show_block(self.session.selection.block if is_block else None)
        self._stack.setCurrentIndex(1 if page is not None else 0)
        self.copy_button.setEnabled(page is not None)
        self.block_history.setVisible(is_block)
        if page is None or self.subject != STEP:
            self.strip.show_phases(())
        if page is None:
            self.empty_label.setText(self._empty_text())
            self.heading.setText("")
        else:
            self.heading.setText(page.title)
            self.table.show_page(page)
        self._color_swatch(page)
        if is_block:
            self.block_history.refresh()

    def apply_theme(self, theme: Theme) -> None:
        super().apply_theme(theme)
        self.table.apply_theme(theme)
        self.strip.apply_theme(theme)
        self.block_history.apply_theme(theme)
        set_icon(self.copy_button, "copy", theme)
        self._color_swatch(None)
        if self.isVisible():
            self.refresh()

    def shut_down(self) -> None:
        self.session.texts.request(self, ())
        self.session.texts.request(self.block_history, ())
        self.block_history.close_history()
        self.steps.close()

    def _page(self) -> FactsPage | None:
        session, mirror = self.session, self.session.mirror
        block, number = session.selection.block, session.selection.request
        if mirror.hello is None:
            return None
        if self.subject == BLOCK and block is not None and block < mirror.num_rows:
            return self._block_page(block)
        if self.subject == REQUEST and number is not None:
            return self._request_page(number)
        session.texts.request(self, ())
        return self._step_page() if self.subject == STEP else None

    def _block_page(self, block: int) -> FactsPage:
        mirror, texts = self.session.mirror, self.session.texts
        assert mirror.hello is not None, "there are blocks only once there is an engine"
        lookup = block_facts(mirror, block, mirror.hello.cache.block_size).text_lookup
        texts.request(self, () if lookup is None else (lookup,))
        if lookup is None:
            return block_page(mirror, block, find_turn=self.session.chat_turns.find)
        placeholder = texts.why_not(lookup) or "…"
        return block_page(mirror, block, texts.get(lookup), placeholder, self.session.chat_turns.find)

    def _request_page(self, number: int) -> FactsPage | None:
        mirror, texts = self.session.mirror, self.session.texts
        blocks = text_blocks(mirror, number)
        texts.request(self, [block.lookup for block in blocks])
        reasons = [texts.why_not(block.lookup) for block in blocks]
        why_not = reasons[0] if all(reasons) and reasons else ""
        parts = [Fact(name, value) for name, value in text_parts(blocks, texts.get, why_not)]
        find_first = partial(self._first_token_ns, mirror.epoch or 0, number)
        columns = self.session.requests.log.columns_of(mirror.epoch or 0, number)
        if columns is not None:
            columns = at_moment(columns, mirror, self.session.timeline.cursor_ns)
        return request_page(mirror, self.session.history, number, parts, find_first, self._event_facts(number), columns)

    def _first_token_ns(self, epoch: int, number: int) -> int:
        return self.session.requests.log.first_token_ns(epoch, number)

    def _step_page(self) -> FactsPage:
        session, mirror = self.session, self.session.mirror
        frame = self._frame()
        why_no_batch = _PAUSE_FIRST
        if not session.timeline.is_playing:
            why_no_batch = "reading…" if self.steps.is_reading else self.steps.failure or "not recorded"
        can_step = session.timeline.range_ns is not None
        timings = newest_timings(mirror, self._newest) if frame is None else frame.timings
        self.strip.show_phases(phases_of(timings))
        event = self._event_facts()
        return step_page(mirror, frame, self._newest, why_no_batch, can_step=can_step, event=event)

    def _frame(self) -> Frame | None:
        """Return the frame of the step shown; None while it has not been read, and during playback."""
        mirror = self.session.mirror
        if self.session.timeline.is_playing or mirror.hello is None:
            return None
        at_ns = mirror.time_ns + wall_offset_ns(mirror.hello)  # may be long ago if the engine was idle since
        return self.steps.get((mirror.hello.epoch, mirror.seq), at_ns)

    def _event_facts(self, number: int | None = None) -> Iterable[Fact]:
        """Return the facts of the event shown, if any; with `number`, only if that request is involved in it."""
        timed, hello = self.session.timeline.shown_event, self.session.mirror.hello
        if (
            timed is None
            or hello is None
            or (number is not None and number not in (timed.event.number, timed.event.other))
        ):
            return ()
        is_before = self.session.timeline.is_before_event
        frame = None if is_before or timed.event.kind != "evicted" else self._frame()
        return event_facts(timed, hello.cache, frame, is_before=is_before)

    def _empty_text(self) -> str:
        selected = (self.session.selection.block, self.session.selection.request, None)[self.subject]
        return EMPTY_TEXTS[self.subject] if selected is None else MISSING_TEXTS[self.subject]

    def _color_swatch(self, page: FactsPage | None) -> None:
        session, mirror, color = self.session, self.session.mirror, ""
        if page is not None and self.subject == REQUEST and session.selection.request is not None:
            color = owner_color(session.selection.request, self.theme).name()
        elif (
            page is not None
            and self.subject == BLOCK
            and mirror.hello is not None
            and session.selection.block is not None
        ):
            facts = block_facts(mirror, session.selection.block, mirror.hello.cache.block_size)
            color = str(getattr(self.theme, facts.color))
        style = f"background: {color}; border: 1px solid {self.theme.border}; border-radius: 3px;" if color else ""
        if style != self._swatch.styleSheet():
            self._swatch.setStyleSheet(style)
        self._swatch.setVisible(bool(color))

    def _on_selection(self) -> None:
        before, selected = self._selected, (self.session.selection.block, self.session.selection.request)
        self._selected = selected
        if selected[0] is not None and selected[0] != before[0]:
            self.subject = BLOCK
        elif selected[1] is not None and selected[1] != before[1]:
            self.subject = REQUEST
        elif self.session.selection.batch:
            self.subject = STEP
        self.subjects.set_current(self.subject)
        if self.isVisible():
            self.refresh()

    def _on_event(self) -> None:
        if (timed := self.session.timeline.shown_event) is not None:
            self.subject = REQUEST if timed.event.number else STEP
            self.subjects.set_current(self.subject)
        self._refresh_if_visible()

    def _on_link(self, link: Link) -> None:
        session = self.session
        if link.target is LinkTarget.BLOCK:
            session.selection.select_block(link.number)
            self.show_subject(BLOCK)
        elif link.target is LinkTarget.REQUEST:
            session.selection.select_request(link.number)
            self.show_subject(REQUEST)
        elif link.target is LinkTarget.CHAT_TURN:
            session.chat_turns.show(session.mirror.epoch or 0, link.number)
        elif link.target is LinkTarget.TIME:
            session.timeline.go_to(link.number)
        elif link.target is LinkTarget.EVENT and link.event is not None:
            session.timeline.show_event(link.event, before=link.number < 0)
        elif link.target is LinkTarget.WHAT_IF:
            self.view_requested.emit("what_if")
        else:
            session.timeline.step_frames(link.number)

    def _on_update(self, update: Update | None) -> None:
        if update is not None and update.series:
            self._newest = update.series

    def _refresh_if_visible(self) -> None:
        if is_on_screen(self):
            self.refresh()

    def _connect(self) -> None:
        self.subjects.chosen.connect(self.show_subject)
        self.copy_button.clicked.connect(lambda: self.table.copy(all_rows=True))
        self.table.followed.connect(self._on_link)
        self.session.selection.changed.connect(self._on_selection)
        self.session.timeline.event_shown.connect(self._on_event)
        self.session.timeline.shown.connect(self._on_update)
        self.block_history.history.changed.connect(self._refresh_if_visible)
        self.steps.found.connect(self._refresh_if_visible)
        self.session.requests_changed.connect(self._refresh_if_visible)
        self.session.texts.arrived.connect(self._refresh_if_visible)

    def _lay_out(self) -> None:
        self.subjects.set_tip(STEP, "The current step: duration, requests run, what changed")
        bar = QHBoxLayout()
        bar.setContentsMargins(8, 6, 6, 6)
        bar.setSpacing(8)
        bar.addWidget(self.subjects)
        bar.addStretch(1)
        bar.addWidget(self.copy_button)
        self._swatch.setFixedSize(scaled(12), scaled(12))
        head = QHBoxLayout()
        head.setContentsMargins(10, 2, 8, 6)
        head.setSpacing(8)
        head.addWidget(self._swatch)
        head.addWidget(self.heading, 1)
        self.splitter = QSplitter(Qt.Orientation.Vertical)
        self.splitter.addWidget(self.table)
        self.splitter.addWidget(self.block_history)
        self.splitter.setStretchFactor(0, 3)
        self.splitter.setStretchFactor(1, 2)
        self.splitter.setChildrenCollapsible(False)
        body = QWidget()
        self._stack = QStackedLayout(body)
        self._stack.addWidget(self.empty_label)
        self._stack.addWidget(self.splitter)
        rows = QVBoxLayout()
        rows.setContentsMargins(0, 0, 0, 0)
        rows.setSpacing(0)
        rows.addLayout(bar)
        rows.addLayout(head)
        self.strip.hide()
        rows.addWidget(self.strip)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(0)
        column.addWidget(head_row(rows))
        column.addWidget(body, 1)


class StepReader(RecordedLookup[FrameKey, Frame]):
    """Reads the frame of the step shown from the recording, on a thread. Only the frame read most recently is
    cached.
    """

    def __init__(self, session: Session, parent: QObject | None = None) -> None:
        super().__init__(session, _read, "kvscope-step", 1, parent)


def _read(recorded: Recording, key: FrameKey, at_ns: int, report_progress: ProgressCallback) -> Frame | None:
    at_s = (at_ns - recorded.start_ns) / 1e9
    for frame in recorded.frames(max(at_s - _READ_BEFORE_S, 0.0), at_s + _READ_AFTER_S):
        if not report_progress(0.0):
            raise OpeningCancelled
        if (frame.epoch, frame.seq) == key:
            return frame
    return None
