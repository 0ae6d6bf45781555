"""Dialog that asks for the options of a picture of one view, and saves them for the next time."""

from __future__ import annotations

from typing import Final

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QCheckBox, QDialog, QDialogButtonBox, QFormLayout, QVBoxLayout

from kvscope_app.media_export.caption import caption_of
from kvscope_app.media_export.media_names import MAX_SCALE
from kvscope_app.media_export.picture import PictureStyle, picture_size
from kvscope_app.session_window import SessionWindow
from kvscope_app.setting_names import PICTURE_CAPTION, PICTURE_SCALE, PICTURE_THEME
from kvscope_app.ui.theme import THEMES
from kvscope_app.ui.widget_factories import combo_box, label
from kvscope_app.views.base import View

_AS_SHOWN: Final = "as shown"


class PictureDialog(QDialog):
    saved = Signal(object)
    """Emitted with the chosen `PictureStyle` when the user wants the picture to be saved to a file."""
    copied = Signal(object)
    """Emitted with the chosen `PictureStyle` when the user wants the picture to be copied to the clipboard."""

    def __init__(self, window: SessionWindow, view: View) -> None:
        super().__init__(window)
        self._view, self._settings = view, window.settings
        self._session = window.session
        self.setWindowTitle(f"Save picture of {view.title}")
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.scale = combo_box([f"{scale} ×" for scale in range(1, MAX_SCALE + 1)], "Scale factor")
        self.theme = combo_box([_AS_SHOWN, *THEMES], "Theme of the picture")
        self.captioned = QCheckBox("Include")
        self.captioned.setToolTip("Model, view and time, below the picture")
        self.captioned.setAccessibleName("Include a caption")
        self._size = label(look="muted")
        self._restore_choices()
        self._lay_out()
        self._show_size()
        self.scale.currentIndexChanged.connect(self._show_size)
        self.captioned.toggled.connect(self._show_size)

    @property
    def picture_style(self) -> PictureStyle:
        theme = THEMES.get(self.theme.currentText())
        caption = caption_of(self._session, self._view.title) if self.captioned.isChecked() else ""
        return PictureStyle(self.scale.currentIndex() + 1, theme, caption)

    def _restore_choices(self) -> None:
        scale, theme = self._settings.value(PICTURE_SCALE, 2), str(self._settings.value(PICTURE_THEME, _AS_SHOWN))
        self.scale.setCurrentIndex(int(str(scale)) - 1 if str(scale) in "123" else 1)
        self.theme.setCurrentText(theme if theme in THEMES else _AS_SHOWN)
        self.captioned.setChecked(str(self._settings.value(PICTURE_CAPTION, "true")) == "true")

    def _save_choices(self) -> None:
        self._settings.setValue(PICTURE_SCALE, self.scale.currentIndex() + 1)
        self._settings.setValue(PICTURE_THEME, self.theme.currentText())
        self._settings.setValue(PICTURE_CAPTION, "true" if self.captioned.isChecked() else "false")

    def _finish(self, *, to_file: bool) -> None:
        self._save_choices()
        style = self.picture_style
        self.accept()
        (self.saved if to_file else self.copied).emit(style)

    def _show_size(self) -> None:
        size = picture_size(self._view, self.picture_style)
        self._size.setText(f"{size.width()} × {size.height()} pixels as PNG; SVG is sharp at any size")

    def _lay_out(self) -> None:
        form = QFormLayout()
        form.addRow("Scale", self.scale)
        form.addRow("Colours", self.theme)
        form.addRow("Caption", self.captioned)
        buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Cancel)
        save = buttons.addButton("Save…", QDialogButtonBox.ButtonRole.AcceptRole)
        copy = buttons.addButton("Copy", QDialogButtonBox.ButtonRole.ActionRole)
        save.setDefault(True)
        save.clicked.connect(lambda: self._finish(to_file=True))
        copy.clicked.connect(lambda: self._finish(to_file=False))
        buttons.rejected.connect(self.reject)
        column = QVBoxLayout(self)
        column.setSpacing(12)
        column.addLayout(form)
        column.addWidget(self._size)
        column.addWidget(buttons)
