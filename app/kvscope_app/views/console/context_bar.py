"""Line below the prompt field: how full the context is, or what the draft would cost (`price_text`)."""

from __future__ import annotations

from typing import Final

from PySide6.QtWidgets import QHBoxLayout, QProgressBar, QWidget

from kvscope_app.ui.number_text import count, percent, plural
from kvscope_app.ui.theme import DARK, Theme
from kvscope_app.ui.widget_factories import label
from kvscope_app.ui.widgets import FittingLabel
from kvscope_app.ui.zoom import scaled
from kvscope_app.views.console.price_text import price_texts
from kvscope_telemetry.messages.commands import PromptEstimate

NEARLY_FULL_SHARE: Final = 0.8
FULL_SHARE: Final = 0.95


class ContextBar(QWidget):
    def __init__(self) -> None:
        super().__init__()
        self.bar = QProgressBar()
        self.bar.setTextVisible(False)
        self.bar.setRange(0, 1000)
        self.bar.setFixedWidth(scaled(72))
        self.bar.setAccessibleName("Context fill")
        self.text = label(look="muted", elastic=True)
        self.price = FittingLabel()
        self.price.hide()
        self._theme: Theme = DARK
        self._share = 0.0
        self._is_warning = False
        row = QHBoxLayout(self)
        row.setContentsMargins(12, 0, 12, 0)
        row.setSpacing(8)
        row.addWidget(self.bar)
        row.addWidget(self.text, 1)
        row.addWidget(self.price, 1)

    def show_fill(self, used: int, limit: int, max_answer_tokens: int = 0) -> None:
        """Show that `used` of `limit` tokens of the context are used. A `limit` of 0 means unknown.

        `max_answer_tokens` is the maximum length of the next answer, 0 if it is unlimited.
        """
        num_left = max(limit - used, 0)
        is_short = bool(used and limit) and num_left < max(max_answer_tokens, round((1 - NEARLY_FULL_SHARE) * limit))
        self._show_share(used, limit)
        text = f"{count(used)} of {count(limit)} context tokens" if limit else f"{count(used)} context tokens"
        text += f", {count(num_left)} left" if is_short else ""
        self.text.setText(text if used or limit else "")
        tip = f"{percent(self._share, 0)} of one request's maximum, by model and KV cache"
        warning = (
            f"\nThe next prompt and its answer have {plural(num_left, 'token')}; a longer answer is cut off"
            if is_short
            else ""
        )
        self.text.setToolTip(tip + warning if limit else "")
        self._show_price(())

    def show_estimate(self, estimate: PromptEstimate, limit: int, max_answer_tokens: int | None) -> None:
        """Show what the draft would cost. A `limit` of 0, and a `max_answer_tokens` of None, mean no known limit."""
        price = price_texts(estimate, estimate.max_request_tokens or limit, max_answer_tokens)
        self._show_share(estimate.num_prompt_tokens, estimate.max_request_tokens or limit)
        self._show_price(price.texts, is_warning=price.is_warning)

    def show_refusal(self, reason: str) -> None:
        """Show why the draft cannot be estimated, which is why the engine would refuse it."""
        short = f"{reason[:1].upper()}{reason[1:]}"  # the rest of a reason that does not fit is in the tooltip
        self._show_price((f"This prompt would not be accepted: {reason}", short), is_warning=True)

    def apply_theme(self, theme: Theme) -> None:
        self._theme = theme
        self._color()

    def _show_share(self, used: int, limit: int) -> None:
        self._share = min(used / limit, 1.0) if limit else 0.0
        self.bar.setVisible(limit > 0)
        self.bar.setValue(round(self._share * 1000))

    def _show_price(self, texts: tuple[str, ...], *, is_warning: bool = False) -> None:
        self._is_warning = is_warning
        self.price.set_variants(*texts)
        self.price.setVisible(bool(texts))
        self.text.setVisible(not texts)
        self._color()

    def _color(self) -> None:
        name = "bad" if self._share >= FULL_SHARE else "warn" if self._share >= NEARLY_FULL_SHARE else "accent"
        sheet = f"QProgressBar::chunk {{ background: {getattr(self._theme, name)}; }}"
        if self.bar.styleSheet() != sheet:
            self.bar.setStyleSheet(sheet)
        sheet = f"color: {self._theme.warn if self._is_warning else self._theme.muted};"
        if self.price.styleSheet() != sheet:
            self.price.setStyleSheet(sheet)
