"""Strip over the page map that reports a problem or offers something, with buttons. Never modal."""

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

_MAX_CHARACTERS: Final = 400
_TEMPORARY_MS: Final = 30_000
"""Display time of a temporary message, long enough to be read twice. Extended while the window is inactive."""

BannerChoice = tuple[str, Callable[[], None]]


class Banner(PassingStrip):
    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._icon, self._text, self._detail = PlainLabel(), _wrapping_label(), _wrapping_label()
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
        """Show a message, in place of the previous one.

        Args:
            text: The problem or offer in one line.
            detail: Explanation below `text`, of any length.
            choices: Label and callback of each button, the most common choice first.
            is_offer: Whether the message is an offer rather than a problem. Chooses icon and colour.
            is_temporary: Whether the message disappears by itself, for example if it reports a failed action.
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
        """Hide the banner's message if it is `text`, which no longer applies. Any other message stays."""
        if self.text == text:
            self.hide()

    def _hide_if_unused(self) -> None:
        """Hide the message, or try again later if the window is inactive or the mouse or focus is on the strip."""
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
        self._icon.setPixmap(pixmap(name, color, scaled(20)))
        set_look(self._frame, "offer" if self._is_offer else "banner")

    @property
    def text(self) -> str:
        return self._shown_text if self.isVisible() else ""

    def _build(self) -> None:
        text_column, row = QVBoxLayout(), QHBoxLayout()
        text_column.setSpacing(1)
        text_column.addWidget(self._text)
        text_column.addWidget(self._detail)
        row.setSpacing(12)
        row.addWidget(self._icon)
        row.addLayout(text_column, 1)
        self._frame = FoldingFrame(row, self._buttons, self._close)
        self._frame.setProperty("look", "banner")
        outer = QVBoxLayout(self)
        outer.setContentsMargins(8, 8, 8, 2)
        outer.addWidget(self._frame)


def _wrapping_label() -> PlainLabel:
    """Return a label that wraps to any number of lines, because the end of an error message often says what to do."""
    result = PlainLabel()
    result.setWordWrap(True)
    policy = QSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Preferred)
    policy.setHeightForWidth(True)
    result.setSizePolicy(policy)
    return result


def _set_text(text_label: PlainLabel, text: str) -> None:
    is_long = len(text) > _MAX_CHARACTERS
    text_label.setText(text[: _MAX_CHARACTERS - 1] + "…" if is_long else text)
    text_label.setToolTip(plain_tip(text) if is_long else "")
