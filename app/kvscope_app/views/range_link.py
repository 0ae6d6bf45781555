"""Links the time range of a view with that of other views, by a button that can turn the link off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from PySide6.QtCore import QObject

from kvscope_app.session.shared_zoom import SharedZoom
from kvscope_app.session.time_span import TimeSpan
from kvscope_app.ui.theme import Theme
from kvscope_app.ui.widget_factories import set_icon, tool_button

_LINKED: Final = "Linked: zooming here zooms all linked views. Click to zoom this view alone"
_UNLINKED: Final = "Not linked: this view is zoomed alone. Click to zoom it with the others"


class RangeLink(QObject):
    """Connection between a view's zoom and the `SharedZoom` of its timeline, while the button is checked."""

    def __init__(
        self,
        shared_zoom: SharedZoom,
        parent: QObject,
        show_span: Callable[[TimeSpan], None],
        show_default: Callable[[], None],
    ) -> None:
        """Create the link. `show_span` zooms the view to a range, `show_default` ends its zoom."""
        super().__init__(parent)
        self._shared_zoom = shared_zoom
        self._show_span = show_span
        self._show_default = show_default
        self._is_choosing = False
        self._is_started = False
        self.button = tool_button("Link time range", _LINKED, checkable=True, checked=True)
        self.button.toggled.connect(self._on_toggled)
        self._theme: Theme | None = None
        shared_zoom.changed.connect(self._on_changed)

    @property
    def is_linked(self) -> bool:
        return self.button.isChecked()

    def start(self) -> None:
        """Show the range that was chosen in other views before this view had data. Later calls have no effect."""
        if not self._is_started:
            self._is_started = True
            if self._shared_zoom.span is not None:
                self._on_changed()

    def choose(self, span: TimeSpan | None) -> None:
        """Zoom all linked views to the range that the user chose in this view; None ends their zoom."""
        if not self.is_linked:
            return
        self._is_choosing = True
        try:
            self._shared_zoom.show(span)
        finally:
            self._is_choosing = False

    def apply_theme(self, theme: Theme) -> None:
        self._theme = theme
        set_icon(self.button, "link" if self.is_linked else "unlink", theme)

    def _on_changed(self) -> None:
        if not self.is_linked or self._is_choosing:
            return
        span = self._shared_zoom.span
        if span is None:
            self._show_default()
        else:
            self._show_span(span)

    def _on_toggled(self) -> None:
        self.button.setToolTip(_LINKED if self.is_linked else _UNLINKED)
        if self._theme is not None:
            self.apply_theme(self._theme)
        self._on_changed()
