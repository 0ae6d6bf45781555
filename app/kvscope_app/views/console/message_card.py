"""One message of a conversation: who, the text, how it ended, its numbers, and what can be done with it."""

from __future__ import annotations

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QFrame, QHBoxLayout, QToolButton, QVBoxLayout

from kvscope_app.look.makers import label, set_icon, tool_button
from kvscope_app.look.number_text import count, plural, seconds, short
from kvscope_app.look.theme import Theme, mix
from kvscope_app.look.widgets import ElidedLabel
from kvscope_app.views.console.answer import AnswerPhase, ChatAnswer
from kvscope_app.views.console.conversation import AnswerStats, Message
from kvscope_app.views.console.text_body import TextBody

_ENDING_TEXT = {
    "length": "token limit reached",
    "stopped": "stopped",
    "refused": "not accepted",
    "error": "failed",
    "interrupted": "interrupted",
}

_QUEUED_FROM_S = 0.01
"""A shorter wait is none."""


class MessageCard(QFrame):
    """Shows one message; an answer that is being written grows."""

    request_wanted = Signal(object, object)
    """Epoch and number of the request the person wants to see in the engine. Objects: an int has 32 bits here."""
    again_wanted = Signal()
    edit_wanted = Signal()

    def __init__(self, message: Message) -> None:
        super().__init__()
        self.message = message
        self._is_answer = message.role == "assistant"
        self.setObjectName("answer" if self._is_answer else "prompt")
        self.who = ElidedLabel("Answer" if self._is_answer else "You")
        self.who.setProperty("look", "muted")
        self.body = TextBody(self.who.text())
        self.notice = label(wraps=True)
        self.notice.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self.stats = label(look="muted", wraps=True)
        self.link = tool_button("", "Select this request in every view")
        self.copy = tool_button("Copy", "Copy the text of this message")
        self.redo = tool_button("Regenerate", "Generate this answer again") if self._is_answer else _edit_button()
        self._connect()
        self._lay_out()
        self.show_whole()

    def show_whole(self) -> None:
        """The message as it is when nothing is being written."""
        is_markdown = self._is_answer and self.message.ending != ""
        (self.body.show_markdown if is_markdown else self.body.show_plain)(self.message.content)
        self.show_state(None)

    def add(self, text: str) -> None:
        """Text that came."""
        self.body.show()
        self.body.add(text)

    def show_state(self, answer: ChatAnswer | None) -> None:
        """Phase or ending, and the numbers."""
        self.body.setVisible(bool(self.message.content))
        notice = _phase_text(answer) if answer is not None else _ending_text(self.message)
        self.notice.setText(notice)
        self.notice.setVisible(bool(notice))
        stats = stats_text(self.message.stats) if self._is_answer else ""
        self.stats.setText(stats)
        self.stats.setVisible(bool(stats))
        number = self.message.stats.number
        self.link.setText(f"Request #{count(number)}")
        self.link.setVisible(number > 0)
        if self._is_answer and (adapter := self.message.stats.adapter):
            self.who.setText(f"Answer  ·  {adapter}")
        self.redo.setEnabled(answer is None)
        self.copy.setVisible(bool(self.message.content))

    def apply_theme(self, theme: Theme) -> None:
        """Prompts lie on a raised card; what went wrong is red."""
        back = theme.raised if not self._is_answer else "transparent"
        line = mix(theme.raised, theme.border, 0.6) if not self._is_answer else "transparent"
        self.setStyleSheet(
            f"QFrame#prompt, QFrame#answer {{ background: {back}; border: 1px solid {line}; border-radius: 8px; }}"
        )
        set_icon(self.copy, "copy", theme)
        set_icon(self.redo, "restart" if self._is_answer else "pencil", theme)
        bad = self.message.ending in ("refused", "error", "interrupted")
        self.notice.setStyleSheet(f"color: {theme.bad if bad else theme.muted};")

    def _connect(self) -> None:
        self.copy.clicked.connect(lambda: QGuiApplication.clipboard().setText(self.message.content))
        self.redo.clicked.connect(self.again_wanted if self._is_answer else self.edit_wanted)
        self.link.clicked.connect(self._on_link)

    def _on_link(self) -> None:
        self.request_wanted.emit(self.message.stats.epoch, self.message.stats.number)

    def _lay_out(self) -> None:
        head = QHBoxLayout()
        head.setSpacing(2)
        head.addWidget(self.who, 1)
        for button in (self.link, self.copy, self.redo):
            head.addWidget(button)
        column = QVBoxLayout(self)
        column.setContentsMargins(12, 4, 8, 10)
        column.setSpacing(4)
        column.addLayout(head)
        for widget in (self.body, self.notice, self.stats):
            column.addWidget(widget)


def stats_text(stats: AnswerStats) -> str:
    """`120 tokens · 45.2 tok/s · first after 120 ms · prompt 345 tokens, 128 cached`; until the engine says:
    `first seen after 130 ms`."""
    parts = []
    if stats.num_tokens:
        parts.append(plural(stats.num_tokens, "token"))
    if stats.tokens_per_s is not None:
        parts.append(f"{short(stats.tokens_per_s)} tok/s")
    if stats.queue_s is not None and stats.queue_s >= _QUEUED_FROM_S:
        parts.append(f"queued {seconds(stats.queue_s)}")
    if stats.ttft_s is not None:
        parts.append(f"first after {seconds(stats.ttft_s)}")
    elif stats.first_seen_s is not None:
        parts.append(f"first seen after {seconds(stats.first_seen_s)}")
    if stats.num_prompt_tokens:
        cached = f", {count(stats.num_cached_tokens)} cached" if stats.num_cached_tokens else ""
        parts.append(f"prompt {plural(stats.num_prompt_tokens, 'token')}{cached}")
    if stats.total_s is not None:
        parts.append(f"{seconds(stats.total_s)} in total")
    return "  ·  ".join(parts)


def _phase_text(answer: ChatAnswer) -> str:
    if answer.phase is AnswerPhase.STOPPING:
        return "Stopping…"
    if answer.phase is AnswerPhase.SENT:
        return f"Sent, waiting for the engine  {seconds(answer.waited_s)}" if answer.waited_s > 1 else "Sent"
    if answer.phase is AnswerPhase.QUEUED:
        return f"In the engine, no token yet  {seconds(answer.waited_s)}" if answer.waited_s > 1 else "In the engine"
    return ""


def _ending_text(message: Message) -> str:
    ending = _ENDING_TEXT.get(message.ending, "")
    return f"{ending.capitalize()}: {message.note}" if ending and message.note else ending.capitalize()


def _edit_button() -> QToolButton:
    return tool_button("Edit", "Edit this prompt and ask again; what follows is removed")
