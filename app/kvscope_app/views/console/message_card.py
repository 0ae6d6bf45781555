"""Card of one message: role, text, ending and statistics."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QFrame, QHBoxLayout, QVBoxLayout

from kvscope_app.ui.number_text import count
from kvscope_app.ui.theme import Theme, mix
from kvscope_app.ui.widget_factories import label, set_icon, tool_button
from kvscope_app.ui.widgets import ElidedLabel
from kvscope_app.views.console.answer_text import ending_text, exact_time, stats_text
from kvscope_app.views.console.attachment_widgets import AttachedFiles
from kvscope_app.views.console.conversation import Message
from kvscope_app.views.console.prefix_mark import PrefixMark
from kvscope_app.views.console.refusal_offers import RefusalOffers
from kvscope_app.views.console.scored_token import ScoredToken, unlikely_ranges
from kvscope_app.views.console.text_body import TextBody, split_reasoning
from kvscope_app.views.console.token_hover import TokenHover
from kvscope_app.views.console.tool_calls_panel import ToolCallsPanel
from kvscope_app.views.console.turn_cache_panel import TurnCachePanel
from kvscope_app.views.console.version_row import VersionRow


class MessageCard(QFrame):
    """Card of one message. Call `show_text` when an unfinished answer got more text, and `show_whole` when it ended."""

    request_clicked = Signal(object, object)
    """Emitted with epoch and number of the answer's request. Declared as objects, because Qt's int has 32 bits."""
    regenerate_requested = Signal()
    edit_requested = Signal()

    def __init__(self, message: Message, number: int = 0) -> None:
        """`number` is the number of the answer among those that were requested together, from 1; 0 for a single one."""
        super().__init__()
        self.message = message
        self._is_answer = message.role == "assistant"
        self._is_left_out = False
        self.offers = RefusalOffers()
        self.offers.hide()
        self.setObjectName("answer" if self._is_answer else "prompt")
        self.role_label = ElidedLabel(_role_text(message, number))
        self.role_label.setProperty("look", "muted")
        self.role_label.setToolTip(exact_time(message.written_s))
        self.body = TextBody(self.role_label.text())
        self.files = AttachedFiles(message.attachments)
        self.reasoning = TextBody("Reasoning")
        self.reasoning_toggle = tool_button(
            "Reasoning", "Show or hide what the model wrote before its answer", checkable=True
        )
        self.notice = label(wraps=True)
        self.notice.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self.stats = label(look="muted", wraps=True)
        self.link = tool_button("", "Select this request in every view")
        self.copy = tool_button("Copy", "Copy the text of this message")
        self.redo = (
            tool_button("Regenerate", "Generate another version of this answer; this one is kept")
            if self._is_answer
            else tool_button("Edit", "Edit this prompt and ask again; this version and its answer are kept")
        )
        if message.tool_results:  # not setVisible(True): without a parent, the button would become a window
            self.redo.hide()
        self.calls = ToolCallsPanel()
        self.versions = VersionRow()
        self.cache = TurnCachePanel()
        self.prefix_mark = PrefixMark(self.body)
        for body in (self.body, self.reasoning):
            TokenHover(body, partial(self._scored_tokens, body))
        self._connect()
        self._lay_out()
        self.show_whole()

    def show_whole(self) -> None:
        reasoning, answer = self._reasoning_and_text()
        self._show_contents(reasoning, answer)
        self.reasoning_toggle.setChecked(bool(reasoning and not answer))
        self._show_parts(reasoning, answer)
        self.calls.show_calls(self.message.tool_calls)
        self.show_state("")

    def show_text(self) -> None:
        """Show the text received so far. Reasoning is folded when the answer begins."""
        reasoning, answer = self._reasoning_and_text()
        if self.reasoning_toggle.isHidden() or (answer and self.body.is_empty):
            self.reasoning_toggle.setChecked(not answer)
        self._show_contents(reasoning, answer)
        self._show_parts(reasoning, answer)

    def show_state(self, progress: str, *, can_ask: bool = True) -> None:
        """Show the engine's progress, or the answer's ending, and the statistics.

        `can_ask` says whether a prompt can be sent now.
        """
        left_out = "Later prompts leave this turn out" if self._is_left_out else ""
        notice = progress or ".  ".join(filter(None, [ending_text(self.message), left_out]))
        self.notice.setText(notice if self._is_answer else "")
        self.notice.setVisible(bool(self.notice.text()))
        stats = stats_text(self.message.stats) if self._is_answer else ""
        self.stats.setText(stats)
        self.stats.setVisible(bool(stats))
        number = self.message.stats.number
        self.link.setText(f"Request #{count(number)}")
        self.link.setVisible(number > 0)
        adapter = self.message.stats.adapter if self._is_answer else ""
        self.role_label.setText("  ·  ".join(filter(None, [self.body.accessibleName(), adapter, self._left_out_text])))
        self.redo.setEnabled(can_ask or not self._is_answer)
        self.copy.setVisible(bool(self.message.content))

    def show_offers(self, *, is_newest: bool, can_shorten: bool) -> None:
        """Show what can be done if this is the newest answer, and was refused because its prompt was too long."""
        self.offers.setVisible(is_newest and self.message.is_too_long)
        self.offers.shorten.setVisible(can_shorten)

    def show_left_out(self, is_left_out: bool) -> None:
        if is_left_out != self._is_left_out:
            self._is_left_out = is_left_out
            self.show_state("")

    @property
    def _left_out_text(self) -> str:
        return "left out of later prompts" if self._is_left_out and not self._is_answer else ""

    def _reasoning_and_text(self) -> tuple[str, str]:
        if not self._is_answer:
            return "", self.message.content
        return split_reasoning(self.message.content, is_complete=self.message.ending != "")

    def _scored_tokens(self, body: TextBody) -> tuple[Sequence[ScoredToken], str, int]:
        """Return the answer's tokens with log-probabilities, its text, and the offset in it at which `body` begins."""
        content = self.message.content
        reasoning, answer = self._reasoning_and_text()
        start = content.find(reasoning) if body is self.reasoning else content.rfind(answer)
        return self.message.scored_tokens, content, start

    def _underline_unlikely_tokens(self, theme: Theme) -> None:
        if not self.message.scored_tokens or not self.message.ending:
            return
        for body in (self.body, self.reasoning):
            tokens, content, start = self._scored_tokens(body)
            ranges = [
                (low - start, high - start) for low, high in unlikely_ranges(tokens, len(content)) if low >= start
            ]
            body.underline(ranges, theme.color("warn"))

    def _show_contents(self, reasoning: str, answer: str) -> None:
        if self._is_answer:
            is_complete = self.message.ending != ""
            self.body.show_markdown(answer, is_complete=is_complete)
            self.reasoning.show_markdown(reasoning, is_complete=is_complete or bool(answer))
        else:
            self.body.show_plain(answer)

    def _show_parts(self, reasoning: str, answer: str) -> None:
        self.reasoning_toggle.setVisible(bool(reasoning))
        self.reasoning.setVisible(bool(reasoning) and self.reasoning_toggle.isChecked())
        self.body.setVisible(bool(answer))

    def apply_theme(self, theme: Theme) -> None:
        background = theme.raised if not self._is_answer else "transparent"
        border = mix(theme.raised, theme.border, 0.6) if not self._is_answer else "transparent"
        self.setStyleSheet(
            f"QFrame#prompt, QFrame#answer {{ background: {background}; border: 1px solid {border};"
            " border-radius: 8px; }"
        )
        self.reasoning.setStyleSheet(f"{self.body.styleSheet()} QTextBrowser {{ color: {theme.muted}; }}")
        self.body.apply_theme(theme)
        self.reasoning.apply_theme(theme)
        self._underline_unlikely_tokens(theme)
        self.calls.apply_theme(theme)
        self.files.apply_theme(theme)
        set_icon(self.copy, "copy", theme)
        set_icon(self.redo, "restart" if self._is_answer else "pencil", theme)
        self.cache.apply_theme(theme)
        self.prefix_mark.apply_theme(theme)
        is_failure = self.message.ending in ("refused", "error", "interrupted")
        self.notice.setStyleSheet(f"color: {theme.bad if is_failure else theme.muted};")

    def _connect(self) -> None:
        self.copy.clicked.connect(lambda: QGuiApplication.clipboard().setText(self.message.content))
        self.redo.clicked.connect(self.regenerate_requested if self._is_answer else self.edit_requested)
        self.link.clicked.connect(self._on_link)
        self.reasoning_toggle.toggled.connect(self._on_fold)

    def _on_link(self) -> None:
        self.request_clicked.emit(self.message.stats.epoch, self.message.stats.number)

    def _on_fold(self, is_open: bool) -> None:
        self.reasoning_toggle.setText("▾ Reasoning" if is_open else "▸ Reasoning")
        self.reasoning.setVisible(is_open)

    def _lay_out(self) -> None:
        head = QHBoxLayout()
        head.setSpacing(2)
        head.addWidget(self.role_label, 1)
        for button in (self.link, self.copy, self.redo):
            head.addWidget(button)
        column = QVBoxLayout(self)
        column.setContentsMargins(12, 4, 8, 10)
        column.setSpacing(4)
        column.addLayout(head)
        column.addWidget(self.files)
        column.addWidget(self.reasoning_toggle, 0, Qt.AlignmentFlag.AlignLeft)
        for part in (self.reasoning, self.body, self.calls, self.notice, self.stats, self.prefix_mark, self.cache):
            column.addWidget(part)
        column.addWidget(self.offers)
        column.addWidget(self.versions)  # next to the buttons above the text, it would widen a narrow dock
        self._on_fold(False)


def _role_text(message: Message, number: int) -> str:
    if message.tool_results:
        return f"Result of {', '.join(result.name for result in message.tool_results)}"
    if message.role == "user":
        return "You"
    return f"Answer {number}" if number else "Answer"
