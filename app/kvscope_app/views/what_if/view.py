"""What if: asks the child process about the requests that run now, and shows its answer as cards.

Owns when to ask: once a second while the view is seen, never two questions at a time, and not when nothing
changed. What is asked is in `workload`, how it is worked out in the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

from PySide6.QtGui import QShowEvent
from PySide6.QtWidgets import QFrame, QScrollArea, QStackedLayout, QVBoxLayout, QWidget

from kvscope_app.look.makers import empty_state, label
from kvscope_app.look.theme import Theme
from kvscope_app.session.session import Session
from kvscope_app.views.base import View
from kvscope_app.views.in_sight import in_sight
from kvscope_app.views.told import why_no_addresses, why_no_requests
from kvscope_app.views.what_if.card_grid import CardGrid
from kvscope_app.views.what_if.process import Rows, WhatIfProcess
from kvscope_app.views.what_if.what_if_legend import Legend
from kvscope_app.views.what_if.words import HEADING, HEADING_TIP
from kvscope_app.views.what_if.workload import memory_of, running_rows
from kvscope_telemetry.messages.what_if import Answer, Memory

NO_ENGINE: Final = "No engine has reported yet.\nWhere other policies would put the requests that run is drawn here."
WORKING: Final = "Working out where other policies would put what runs…"
NOTHING: Final = "Nothing is running.\nSend a prompt or start the load, to see where other policies would put it."
NOTHING_THEN: Final = (
    "Nothing ran at this moment of the recording.\nAt another, this shows where other policies would have put what ran."
)

Question = tuple[int | None, Memory, Rows]
"""Epoch, memory, the requests that run."""


class WhatIfView(View):
    """A heading, a legend, and a card a policy."""

    title: ClassVar[str] = "What if"
    object_name: ClassVar[str] = "what_if"
    refresh_hz: ClassVar[float] = 1.0

    def __init__(
        self, session: Session, parent: QWidget | None = None, *, command: Sequence[str] | None = None
    ) -> None:
        """`command` replaces the engine's."""
        super().__init__(session, parent)
        self.process = WhatIfProcess(self, command)
        self.process.answered.connect(self._on_answer)
        self.process.failed.connect(self._on_failure)
        self.legend = Legend()
        self.grid = CardGrid()
        self.empty = empty_state(NO_ENGINE)
        self._asked: Question | None = None
        self._failure = ""
        self._lay_out()

    def refresh(self) -> None:
        if not in_sight(self):
            return
        memory = memory_of(self.session.mirror)
        told = self.session.mirror.capabilities
        reason = why_no_addresses(told) or why_no_requests(told)
        if memory is None:
            self._say(NO_ENGINE)
        elif reason:
            self._say(f"{reason}.\nWhere other policies would put what runs cannot be worked out.")
        elif not self._failure:
            self._ask((self.session.mirror.epoch, memory, running_rows(self.session.mirror)))

    def apply_theme(self, theme: Theme) -> None:
        super().apply_theme(theme)
        self.legend.apply_theme(theme)
        self.grid.apply_theme(theme)

    def shut_down(self) -> None:
        self.process.close()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self.came_in_sight()

    def came_in_sight(self) -> None:
        """What failed is tried again when the view is opened again."""
        self._failure = ""

    @property
    def is_settled(self) -> bool:
        return not self.process.is_busy

    def _ask(self, question: Question) -> None:
        *_, rows = question
        if not rows:
            self._say(NOTHING_THEN if self.session.is_file else NOTHING)
        if self.process.is_busy or question == self._asked or not (rows or self.process.is_running):
            return
        if rows and self._asked is None:
            self._say(WORKING)  # its process starts: that takes seconds
        self._asked = question
        self.process.ask(*question)

    def _on_answer(self, answer: Answer) -> None:
        if self._asked is not None and self._asked[-1]:
            self.legend.show_pages(answer.page_bytes)
            self.grid.show_answer(answer)
            self._stack.setCurrentIndex(1)

    def _on_failure(self, reason: str) -> None:
        self._asked = None
        self._failure = reason
        self._say(reason)

    def _say(self, text: str) -> None:
        if self.empty.text() != text:
            self.empty.setText(text)
        self._stack.setCurrentIndex(0)

    def _lay_out(self) -> None:
        body = QWidget()
        column = QVBoxLayout(body)
        column.setContentsMargins(12, 10, 12, 12)
        column.setSpacing(8)
        heading = label(HEADING, "muted", wraps=True)
        heading.setToolTip(HEADING_TIP)
        column.addWidget(heading)
        column.addWidget(self.legend)
        column.addWidget(self.grid)
        column.addStretch(1)
        scroll = QScrollArea()
        scroll.setWidget(body)
        scroll.setWidgetResizable(True)
        scroll.setFrameShape(QFrame.Shape.NoFrame)
        self._stack = QStackedLayout(self)
        self._stack.addWidget(self.empty)
        self._stack.addWidget(scroll)
