"""Dialog that asks for the options of a video of a window's timeline, and starts making the video."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from PySide6.QtCore import Qt
from PySide6.QtWidgets import (
    QCheckBox,
    QDialog,
    QDialogButtonBox,
    QFormLayout,
    QVBoxLayout,
)

from kvscope_app.media_export.encoders import is_encoder_installed
from kvscope_app.media_export.media_names import VIDEO_SUFFIXES
from kvscope_app.media_export.picture_spec import PictureSpec
from kvscope_app.media_export.video_export import make_video
from kvscope_app.session_window import SessionWindow
from kvscope_app.ui.file_dialogs import ask_save
from kvscope_app.ui.widget_factories import combo_box, label, seconds_box
from kvscope_app.views.docks import DOCKS

_VIEWS: Final = {"Page map": "page-map"} | {spec.title: spec.picture_name for spec in DOCKS if spec.is_on_time}
_SPEEDS: Final = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
_FPS: Final = (5, 10, 15, 20, 30)
_DEFAULT_LENGTH_S: Final = 20.0


class VideoDialog(QDialog):
    def __init__(self, window: SessionWindow, path: Path) -> None:
        super().__init__(window)
        self._window, self._path = window, path
        timeline = window.session.timeline
        range_ns, origin_ns = timeline.range_ns, timeline.origin_ns
        assert range_ns is not None, "nothing to make a video of"
        assert origin_ns is not None, "a time to go to has an origin"
        self._start_s = (range_ns[0] - origin_ns) / 1e9
        """Time at which the window's retained history starts, in seconds from the timeline's origin.

        The dialog's time fields count from the start of the retained history.
        """
        length_s = (range_ns[1] - range_ns[0]) / 1e9
        cursor_s = min(max((timeline.cursor_ns - range_ns[0]) / 1e9, 0.0), length_s)
        self.setWindowTitle("Save video")
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.view = combo_box(list(_VIEWS), "View")
        self.first = seconds_box(0.0, length_s, max(0.0, cursor_s - _DEFAULT_LENGTH_S), "From")
        self.last = seconds_box(0.0, length_s, max(cursor_s, min(_DEFAULT_LENGTH_S, length_s)), "Until")
        self.speed = combo_box([f"{speed:g} ×" for speed in _SPEEDS], "Speed")
        self.fps = combo_box([f"{fps} per second" for fps in _FPS], "Frames")
        self.format_box = combo_box([suffix + _requirement(suffix) for suffix in VIDEO_SUFFIXES], "Format")
        self.captioned = QCheckBox("Include")
        self.captioned.setToolTip("Model, view and time, below the picture")
        self.captioned.setAccessibleName("Include a caption")
        self.captioned.setChecked(True)
        self.speed.setCurrentIndex(_SPEEDS.index(1.0))
        self.fps.setCurrentIndex(_FPS.index(10))
        self.format_box.setCurrentIndex(
            next((index for index, suffix in enumerate(VIDEO_SUFFIXES) if is_encoder_installed(suffix)), 0)
        )
        self._description = label(look="muted")
        self._lay_out()
        self._show_description()

    @property
    def length_s(self) -> float:
        return max(self.last.value() - self.first.value(), 0.0) / _SPEEDS[self.speed.currentIndex()]

    def spec(self, path: Path) -> PictureSpec:
        """Return the chosen options of a video written to `path`. Its times count from the timeline's origin."""
        suffix = VIDEO_SUFFIXES[self.format_box.currentIndex()]
        return PictureSpec(
            path if path.suffix.lower() == suffix else path.with_name(path.name + suffix),
            suffix,
            _VIEWS[self.view.currentText()],
            from_s=self._start_s + self.first.value(),
            until_s=self._start_s + self.last.value(),
            speed=_SPEEDS[self.speed.currentIndex()],
            fps=float(_FPS[self.fps.currentIndex()]),
            theme="dark" if self._window.themes.theme.is_dark else "light",
            captioned=self.captioned.isChecked(),
        )

    def accept(self) -> None:
        suffix = VIDEO_SUFFIXES[self.format_box.currentIndex()]
        spec = self.spec(self._path)
        start = partial(_start, self._window, spec)
        ask_save(self._window, "Save video", spec.path, f"Video (*{suffix})", start)
        super().accept()

    def _show_description(self) -> None:
        num_frames = round(self.length_s * _FPS[self.fps.currentIndex()]) + 1
        suffix = VIDEO_SUFFIXES[self.format_box.currentIndex()]
        self._save.setEnabled(num_frames > 1 and is_encoder_installed(suffix))
        self._description.setText(f"{num_frames:,} frames, {self.length_s:.1f} s; saved in the background")

    def _lay_out(self) -> None:
        form = QFormLayout()
        for text, widget in (
            ("View", self.view),
            ("From", self.first),
            ("Until", self.last),
            ("Speed", self.speed),
            ("Frames", self.fps),
            ("Format", self.format_box),
            ("Caption", self.captioned),
        ):
            form.addRow(text, widget)
        buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Cancel)
        self._save = buttons.addButton("Save…", QDialogButtonBox.ButtonRole.AcceptRole)
        buttons.accepted.connect(self.accept)
        buttons.rejected.connect(self.reject)
        for box in (self.speed, self.fps, self.format_box):
            box.currentIndexChanged.connect(self._show_description)
        for time_box in (self.first, self.last):
            time_box.valueChanged.connect(self._show_description)
        column = QVBoxLayout(self)
        column.setSpacing(12)
        column.addLayout(form)
        column.addWidget(self._description)
        column.addWidget(buttons)


def _requirement(suffix: str) -> str:
    return "" if is_encoder_installed(suffix) else " (needs ffmpeg)" if suffix == ".mp4" else " (needs Pillow)"


def _start(window: SessionWindow, spec: PictureSpec, path: str) -> None:
    make_video(window, replace(spec, path=Path(path)))
