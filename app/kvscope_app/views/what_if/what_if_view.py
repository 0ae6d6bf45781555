"""View of what other settings would have changed for past requests (`QuestionPanel`), and of how other allocators would
use the same memory for the running requests: one card per allocator.

While the view is visible and the requests have changed, it sends a question to the simulator, a child process, at most
once per second and one at a time. Functions of this module compose the question; the child computes the answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt
from PySide6.QtCore import QSize
from PySide6.QtGui import QImage, QPainter, QPaintEvent, QResizeEvent, QShowEvent
from PySide6.QtWidgets import (
    QBoxLayout,
    QFrame,
    QGridLayout,
    QLabel,
    QSizePolicy,
    QStackedLayout,
    QVBoxLayout,
    QWidget,
)

from kvscope_app.session.session import Session
from kvscope_app.ui.plain_text import plain_tip
from kvscope_app.ui.theme import DARK, Theme
from kvscope_app.ui.widget_factories import empty_state, label, scroll_area, set_look
from kvscope_app.ui.widgets import ElidedLabel
from kvscope_app.ui.zoom import scaled
from kvscope_app.views.base import View
from kvscope_app.views.capability_messages import why_no_addresses, why_no_requests
from kvscope_app.views.visibility import is_on_screen
from kvscope_app.views.what_if import policy_text
from kvscope_app.views.what_if.policy_text import HEADING, HEADING_TIP, map_colors
from kvscope_app.views.what_if.question_panel import QuestionPanel
from kvscope_app.views.what_if.simulator_process import Rows, WhatIfSimulator
from kvscope_app.views.what_if.what_if_legend import WhatIfLegend
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.what_if import (
    HOST_PAGE_BYTES,
    MAX_REQUESTS,
    PAGE_BYTES,
    MapKind,
    Memory,
    PolicyUse,
    WhatIfAnswer,
)
from kvscope_telemetry.mirror.mirror import Mirror

MAP_HEIGHT: Final = 54
MAP_BESIDE_HEIGHT: Final = 72
"""Height in pixels of a memory map that is next to its text instead of above it."""
MIN_CARD_WIDTH: Final = 152
_GAP: Final = 8
NO_ENGINE: Final = (
    "Waiting for the engine's first report.\nThis shows how other allocators would place the running requests."
)
WORKING: Final = "Calculating how other allocators would place the running requests…"
NOTHING: Final = "Nothing is running.\nSend a prompt or start the load to compare allocators."
NOTHING_RAN: Final = "Nothing ran at this time of the recording."

Question = tuple[int | None, Memory, Rows]
"""Question to the simulator: (epoch, memory, running requests)."""


class WhatIfView(View):
    title: ClassVar[str] = "What if"
    object_name: ClassVar[str] = "what_if"
    refresh_hz: ClassVar[float] = 1.0

    def __init__(
        self, session: Session, parent: QWidget | None = None, *, command: Sequence[str] | None = None
    ) -> None:
        """Create the view. If `command` is given, it is started as the simulator instead of `kvscope-engine
        what-if`.
        """
        super().__init__(session, parent)
        self.question = QuestionPanel(session, command=command)
        self.process = WhatIfSimulator(self, command)
        self.process.answered.connect(self._on_answer)
        self.process.failed.connect(self._on_failure)
        self.legend = WhatIfLegend()
        self.grid = CardGrid()
        self.missing = label("", "muted", wraps=True)
        self.missing.hide()
        self.empty = empty_state(NO_ENGINE)
        self._pending_question: Question | None = None
        self._failure = ""
        self._lay_out()

    def refresh(self) -> None:
        if not is_on_screen(self):
            return
        self.question.refresh()
        memory = memory_of(self.session.mirror)
        capabilities = self.session.mirror.capabilities
        reason = why_no_addresses(capabilities) or why_no_requests(capabilities)
        if memory is None:
            self._show_message(NO_ENGINE)
        elif reason:
            self._show_message(f"{reason}.\nAllocators cannot be compared.")
        elif not self._failure:
            self._ask((self.session.mirror.epoch, memory, running_rows(self.session.mirror)))

    def apply_theme(self, theme: Theme) -> None:
        super().apply_theme(theme)
        self.legend.apply_theme(theme)
        self.grid.apply_theme(theme)

    def shut_down(self) -> None:
        self.process.close()
        self.question.close_process()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self.became_visible()

    def became_visible(self) -> None:
        """Allow the view to ask again if its last question failed."""
        self._failure = ""

    @property
    def is_loaded(self) -> bool:
        return not self.process.is_busy

    def _ask(self, question: Question) -> None:
        *_, rows = question
        if not rows:
            self._show_message(NOTHING_RAN if self.session.timeline.is_file else NOTHING)
        if self.process.is_busy or question == self._pending_question or not (rows or self.process.is_running):
            return
        if rows and self._pending_question is None:
            self._show_message(WORKING)  # starting the process takes seconds
        self._pending_question = question
        self.process.ask(*question)

    def _on_answer(self, answer: WhatIfAnswer) -> None:
        if self._pending_question is not None and self._pending_question[-1]:
            has_unread = any(use.num_unread for use in answer.policies)
            self.legend.show_kinds(page_bytes=answer.page_bytes, has_unread=has_unread)
            self.grid.show_answer(answer)
            self.missing.setText(policy_text.not_asked(answer.not_asked))
            self.missing.setToolTip(plain_tip(policy_text.why_not_asked(answer.not_asked)))
            self.missing.setVisible(bool(answer.not_asked))
            self._stack.setCurrentIndex(1)

    def _on_failure(self, reason: str) -> None:
        self._pending_question = None
        self._failure = reason
        self._show_message(reason)

    def _show_message(self, text: str) -> None:
        if self.empty.text() != text:
            self.empty.setText(text)
        self._stack.setCurrentIndex(0)

    def _lay_out(self) -> None:
        cards = QWidget()
        column = QVBoxLayout(cards)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(8)
        heading = label(HEADING, "muted", wraps=True)
        heading.setToolTip(HEADING_TIP)
        column.addWidget(heading)
        column.addWidget(self.legend)
        column.addWidget(self.grid)
        column.addWidget(self.missing)
        column.addStretch(1)
        pages = QWidget()
        self._stack = QStackedLayout(pages)
        self._stack.addWidget(self.empty)
        self._stack.addWidget(cards)
        body = QWidget()
        whole = QVBoxLayout(body)
        whole.setContentsMargins(12, 10, 12, 12)
        whole.setSpacing(10)
        whole.addWidget(self.question)
        whole.addWidget(pages, 1)
        outer = QVBoxLayout(self)
        outer.setContentsMargins(0, 0, 0, 0)
        outer.addWidget(scroll_area(body))


# Memory and requests of a mirror for the question, in O(requests); blocks are not read.
def memory_of(mirror: Mirror) -> Memory | None:
    """Return the engine's KV memory, or None if there is no engine or it has no blocks."""
    if mirror.hello is None or not mirror.hello.cache.num_blocks:
        return None
    cache, model = mirror.hello.cache, mirror.hello.model
    return Memory(
        num_blocks=cache.num_physical_blocks or max(1, cache.num_blocks - cache.num_reserved_blocks),
        block_size=cache.block_size,
        block_bytes=cache.block_bytes,
        num_layers=model.num_layers,
        max_model_len=model.max_model_len,
        allocator=cache.allocator,
        page_bytes=PAGE_BYTES if mirror.hello.device.kind == "cuda" else HOST_PAGE_BYTES,
        groups=tuple(
            group for number, group in enumerate(cache.groups) if number != cache.group_of_states or group.num_blocks
        ),
    )


def running_rows(mirror: Mirror) -> Rows:
    """Return the requests that hold blocks, oldest first.

    Each is a list of the request's number, computed tokens, maximum tokens (0 if unknown), and prompt tokens.
    """
    requests = mirror.requests
    holds_blocks = (
        (requests.state == RequestState.RUNNING) & (requests.num_blocks > 0) & (requests.num_computed_tokens > 0)
    )
    rows = np.flatnonzero(holds_blocks)[:MAX_REQUESTS]
    prompt, limit = requests.num_prompt_tokens[rows], requests.max_tokens[rows]
    limits = np.where(limit > 0, prompt + limit, 0)
    columns = (requests.number[rows], requests.num_computed_tokens[rows], limits, prompt)
    result: Rows = np.stack(columns, axis=1).tolist()
    return result


# Cards side by side, as many per row as fit.
class CardGrid(QWidget):
    def __init__(self) -> None:
        super().__init__()
        self.cards: list[PolicyCard] = []
        self._theme = DARK
        self._num_columns = 1
        self._grid = QGridLayout(self)
        self._grid.setContentsMargins(0, 0, 0, 0)
        self._grid.setSpacing(_GAP)

    def show_answer(self, answer: WhatIfAnswer) -> None:
        """Show a card per allocator: the engine's current allocator first, then all others in the order of `answer`."""
        if len(answer.policies) != len(self.cards):
            self._set_num_cards(len(answer.policies))
        for card, use in zip(self.cards, sorted(answer.policies, key=lambda use: not use.is_current), strict=True):
            card.show_use(use, answer)

    def apply_theme(self, theme: Theme) -> None:
        self._theme = theme
        for card in self.cards:
            card.apply_theme(theme)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._arrange()

    def _set_num_cards(self, number: int) -> None:
        for card in self.cards[number:]:
            self._grid.removeWidget(card)
            card.deleteLater()
        del self.cards[number:]
        while len(self.cards) < number:
            self.cards.append(PolicyCard())
            self.cards[-1].apply_theme(self._theme)
        self._num_columns = 0
        self._arrange()

    def _arrange(self) -> None:
        max_columns = max(1, (self.width() + _GAP) // (scaled(MIN_CARD_WIDTH) + _GAP))
        num_columns = num_columns_of(len(self.cards), max_columns)
        if num_columns == self._num_columns:
            return
        for column in range(max(self._num_columns, num_columns)):
            self._grid.setColumnStretch(column, 1 if column < num_columns else 0)
        self._num_columns = num_columns
        for index, card in enumerate(self.cards):
            card.set_map_beside_text(num_columns == 1)
            self._grid.addWidget(card, index // num_columns, index % num_columns)


def num_columns_of(num_cards: int, max_columns: int) -> int:
    """Return the smallest number of columns that needs no more card rows than `max_columns` columns would need.

    The cards are then distributed evenly.
    """
    num_rows = -(-max(1, num_cards) // max_columns)
    return -(-max(1, num_cards) // num_rows)


# Card of one allocator: name, map, waste, and number of requests that fit. Depends only on an answer.
class PolicyCard(QFrame):
    """Card of one allocator. Its texts are elided; the tooltip has them in full."""

    def __init__(self) -> None:
        super().__init__()
        self.setProperty("look", "card")
        self.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
        self.name = ElidedLabel()
        self.name.setProperty("look", "heading")
        self.map = SmallMap()
        self.waste = _large_label()
        self.share, self.placed, self.difference = ElidedLabel(), ElidedLabel(), ElidedLabel()
        for muted_label in (self.share, self.difference):
            muted_label.setProperty("look", "muted")
        self._lay_out()

    def show_use(self, use: PolicyUse, answer: WhatIfAnswer) -> None:
        set_look(self, "current" if use.is_current else "card")
        self.name.setText(policy_text.name(use))
        self.map.show_cells(use.cells)
        self.waste.setText(policy_text.waste(use))
        self.share.setText(policy_text.waste_share(use))
        self.placed.setText(policy_text.placed(use))
        set_look(self.difference, "accent" if use.is_current else "muted")
        set_look(self.placed, "warning" if use.num_waiting or use.refused else "")
        self.difference.setText(policy_text.difference(use, answer))
        self.setToolTip(plain_tip(policy_text.tip(use, answer)))
        self.setAccessibleName(self.name.text())
        self.setAccessibleDescription(self.summary)

    @property
    def summary(self) -> str:
        parts = (self.waste.text(), self.share.text(), self.placed.text(), self.difference.text())
        return ", ".join(part for part in parts if part)

    def apply_theme(self, theme: Theme) -> None:
        self.map.apply_theme(theme)

    def set_map_beside_text(self, is_beside: bool) -> None:
        direction = QBoxLayout.Direction.LeftToRight if is_beside else QBoxLayout.Direction.TopToBottom
        self._body.setDirection(direction)
        self._body.setSpacing(12 if is_beside else 5)
        self.map.setFixedHeight(scaled(MAP_BESIDE_HEIGHT if is_beside else MAP_HEIGHT))

    def _lay_out(self) -> None:
        texts = QVBoxLayout()
        texts.setSpacing(3)
        for line in (self.waste, self.share, self.placed, self.difference):
            texts.addWidget(line)
        self._body = QBoxLayout(QBoxLayout.Direction.TopToBottom)
        self._body.addWidget(self.map, 2)
        self._body.addLayout(texts, 3)
        column = QVBoxLayout(self)
        column.setContentsMargins(11, 8, 11, 9)
        column.setSpacing(5)
        column.addWidget(self.name)
        column.addLayout(self._body)
        self.set_map_beside_text(False)


def _large_label() -> QLabel:
    result = ElidedLabel()
    font = result.font()
    font.setPointSizeF(font.pointSizeF() * 1.4)
    font.setBold(True)
    result.setFont(font)
    return result


class SmallMap(QWidget):
    """Memory of an allocator as a few thousand cells in the order of addresses, painted as one scaled image.

    Cells run from left to right in rows from the top.
    """

    def __init__(self) -> None:
        super().__init__()
        self._cells: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self._colors: npt.NDArray[np.uint32] = np.empty(0, np.uint32)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setFixedHeight(scaled(MAP_HEIGHT))
        self.apply_theme(DARK)

    def show_cells(self, cells: bytes) -> None:
        """Show the cells, one byte (`MapKind`) each. Kinds that only a later version defines are shown as free."""
        kinds = np.frombuffer(cells, np.uint8)
        if not np.array_equal(kinds, self._cells):
            self._cells = np.where(kinds < len(MapKind), kinds, np.uint8(MapKind.FREE))
            self.update()

    def apply_theme(self, theme: Theme) -> None:
        colors = map_colors(theme)
        names = [*(colors[kind] for kind in MapKind), theme.panel]
        self._colors = np.array([0xFF000000 | int(color[1:], 16) for color in names], np.uint32)
        self.update()

    def minimumSizeHint(self) -> QSize:
        return QSize(60, self.minimumHeight())

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        pixels = self.pixels()
        image = QImage(pixels.data, pixels.shape[1], pixels.shape[0], 4 * pixels.shape[1], QImage.Format.Format_RGB32)
        painter.drawImage(self.rect(), image)
        painter.end()

    def pixels(self) -> npt.NDArray[np.uint32]:
        """Return one pixel per cell, shape (rows, columns), with a shape for which cells are about square on the
        widget.

        Unused cells at the end of the last row have the background colour.
        """
        num_cells = max(1, self._cells.size)
        columns = max(1, round(math.sqrt(num_cells * self.width() / self.height())))
        columns = min(columns, num_cells)
        kinds = np.full((-(-num_cells // columns), columns), len(MapKind), np.uint8)
        kinds.flat[: self._cells.size] = self._cells
        return self._colors[kinds]
