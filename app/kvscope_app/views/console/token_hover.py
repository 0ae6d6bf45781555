"""Tooltip with the probability of the token under the mouse, and of its alternatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Final

from PySide6.QtCore import QEvent, QObject, QPoint, QRect, Qt
from PySide6.QtGui import QHelpEvent, QTextCursor
from PySide6.QtWidgets import QToolTip

from kvscope_app.ui.number_text import percent
from kvscope_app.views.console.scored_token import ScoredToken, probability, token_at
from kvscope_app.views.console.text_body import TextBody

_MAX_TEXT: Final = 40
_SMALLEST: Final = 0.0001


class TokenHover(QObject):
    """Shows tooltips for tokens in `body`.

    `scored` returns the tokens and the whole answer, and the offset at which the text of `body` begins in the answer.
    """

    def __init__(self, body: TextBody, scored: Callable[[], tuple[Sequence[ScoredToken], str, int]]) -> None:
        super().__init__(body)
        self._body = body
        self._scored = scored
        body.viewport().installEventFilter(self)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        if event.type() is not QEvent.Type.ToolTip or not isinstance(event, QHelpEvent):
            return super().eventFilter(watched, event)
        text, area = self._tip_at(event.pos())
        if text:
            QToolTip.showText(event.globalPos(), text, self._body.viewport(), area)
        else:
            QToolTip.hideText()
            event.ignore()
        return True

    def _tip_at(self, point: QPoint) -> tuple[str, QRect]:
        """Return the tooltip at a point of the viewport and the area in which it stays, or an empty text."""
        nothing = ("", QRect())
        tokens, answer, body_start = self._scored()
        if not tokens:
            return nothing
        position = self._body.document().documentLayout().hitTest(point.toPointF(), Qt.HitTestAccuracy.ExactHit)
        offset = None if position < 0 else self._body.source_offset(position)
        found = None if offset is None else token_at(tokens, body_start + offset, len(answer))
        if found is None:
            return nothing
        token, start, end = found
        return token_tip(token, answer[start:end]), self._character_area(position)

    def _character_area(self, position: int) -> QRect:
        cursor = QTextCursor(self._body.document())
        cursor.setPosition(position)
        left = self._body.cursorRect(cursor)
        cursor.movePosition(QTextCursor.MoveOperation.NextCharacter)
        right = self._body.cursorRect(cursor)
        return left.united(right) if right.top() == left.top() else left.adjusted(0, 0, left.height() // 2, 0)


def token_tip(token: ScoredToken, text: str) -> str:
    """Return a tooltip with the token's probability, and those of the most likely tokens at its position."""
    rows = [f"<b>{_quoted(text)}&nbsp; {_percent(token.logprob)}</b>"]
    rows += [f"{_quoted(other)}&nbsp; {_percent(logprob)}" for other, logprob in token.top]
    heading = "<br><span>Most likely:</span><br>" if token.top else ""
    return f"<p style='white-space: pre'>{rows[0]}{heading}{'<br>'.join(rows[1:])}</p>"


def _quoted(text: str) -> str:
    short = text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"
    visible = short.replace("\n", "⏎").replace("\t", "⇥")
    return escape(f"“{visible}”")


def _percent(logprob: float) -> str:
    share = probability(logprob)
    return f"under {percent(_SMALLEST, 2)}" if share < _SMALLEST else percent(share, 2 if share < 0.01 else 1)
