"""Strip over the map that reports a problem and offers actions. Never modal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from PySide6.QtCore import QTimer
from PySide6.QtWidgets import QApplication, QHBoxLayout, QSizePolicy, QToolButton, QVBoxLayout, QWidget

from kvscope_app.ui.folding_frame import FoldingFrame
from kvscope_app.ui.icons import icon, pixmap
from kvscope_app.ui.passing_strip import PassingStrip
from kvscope_app.ui.plain_text import PlainLabel, plain_tip
from kvscope_app.ui.theme import DARK, Theme
from kvscope_app.ui.widget_factories import set_look, show_choices
from kvscope_app.ui.zoom import scaled

_MAX_LETTERS: Final = 400
_TEMPORARY_MS: Final = 30_000
"""Minimum display time of a passing message while its window is active; long enough to be read twice."""

BannerChoice = tuple[str, Callable[[], None]]


class Banner(PassingStrip):
    """Strip with a message. Hidden until `show_message`."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._sign, self._text, self._detail = PlainLabel(), _wrapping_label(), _wrapping_label()
        self._text.setProperty("look", "heading")
        self._detail.setProperty("look", "muted")
        self._close = QToolButton()
        self._close.setAccessibleName("Dismiss")
        self._close.clicked.connect(self.hide)
        self._buttons = QHBoxLayout()
        self._theme, self._is_offer, self._shown_text = DARK, False, ""
        self.hide_timer = QTimer(self, singleShot=True, interval=_TEMPORARY_MS)
        self.hide_timer.timeout.connect(self._hide_if_unused)
        self._build()
        self.hide()

    def apply_theme(self, theme: Theme) -> None:
        self._theme = theme
        self._update_style()
        self._close.setIcon(icon("close", theme.muted, size=14))

    def show_message(
        self,
        text: str,
        detail: str = "",
        choices: Sequence[BannerChoice] = (),
        *,
        is_offer: bool = False,
        is_temporary: bool = False,
    ) -> None:
        """Show a message.

        Args:
            choices: Buttons, the most common choice first.
            is_offer: Whether it is an offer rather than a problem, which looks different.
            passes: Whether the message disappears by itself, for example if it reports a failed action.
        """
        self._is_offer = is_offer
        self._update_style()
        _set_text(self._text, text)
        _set_text(self._detail, detail)
        self._detail.setVisible(bool(detail))
        show_choices(self._buttons, choices)
        self._frame.fold()
        self._shown_text = text
        self.setAccessibleName(f"{text} {detail}")
        self.show()
        if is_temporary:
            self.hide_timer.start()
        else:
            self.hide_timer.stop()

    def withdraw(self, text: str) -> None:
        """Hide the message `text`, which no longer applies. Any other message stays."""
        if self.text == text:
            self.hide()

    def _hide_if_unused(self) -> None:
        """Hide the message, unless the window is inactive or the user is about to use the strip."""
        if not self.isVisible():
            return
        focus = QApplication.focusWidget()
        is_used = self.underMouse() or (focus is not None and self.isAncestorOf(focus))
        if self.window().isActiveWindow() and not is_used:
            self.hide()
        else:
            self.hide_timer.start()

    def _update_style(self) -> None:
        name, color = ("recordings", self._theme.accent) if self._is_offer else ("warning", self._theme.bad)
        self._sign.setPixmap(pixmap(name, color, scaled(20)))
        set_look(self._frame, "offer" if self._is_offer else "banner")

    @property
    def text(self) -> str:
        """The shown message, empty if hidden."""
        return self._shown_text if self.isVisible() else ""

    def _build(self) -> None:
        words, row = QVBoxLayout(), QHBoxLayout()
        words.setSpacing(1)
        words.addWidget(self._text)
        words.addWidget(self._detail)
        row.setSpacing(12)
        row.addWidget(self._sign)
        row.addLayout(words, 1)
        self._frame = FoldingFrame(row, self._buttons, self._close)
        self._frame.setProperty("look", "banner")
        outer = QVBoxLayout(self)
        outer.setContentsMargins(8, 8, 8, 2)
        outer.addWidget(self._frame)


def _wrapping_label() -> PlainLabel:
    """Return a label that wraps to any number of lines, because the end of a reason is what helps."""
    made = PlainLabel()
    made.setWordWrap(True)
    policy = QSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
    policy.setHeightForWidth(True)
    made.setSizePolicy(policy)
    return made


def _set_text(words: PlainLabel, text: str) -> None:
    """Set a label's text, truncated if it is very long, with the full text as the tooltip."""
    is_long = len(text) > _MAX_LETTERS
    words.setText(text[: _MAX_LETTERS - 1] + "…" if is_long else text)
    words.setToolTip(plain_tip(text) if is_long else "")
