"""A picture of one view: the view paints itself, into an image or an SVG file, in its own theme or another.

Owns the size of the picture and the caption below it. Knows no view in particular: there is no second painter.
A bitmap in a view (the cells of the page map, the heatmap, the lanes) is made as large without being smoothed: a pixel
of the screen is a square of the picture. Words and lines are drawn at the picture's own scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from PySide6.QtCore import QBuffer, QByteArray, QIODevice, QPoint, QRect, QRectF, QSize, Qt
from PySide6.QtGui import QColor, QFontMetricsF, QImage, QImageWriter, QPainter
from PySide6.QtWidgets import QAbstractButton, QApplication, QComboBox, QLineEdit, QScrollBar, QWidget

from kvscope_app.look.fonts import sans
from kvscope_app.look.theme import Theme
from kvscope_app.look.theming.apply_theme import apply_theme
from kvscope_app.look.widgets import SegmentedControl
from kvscope_app.views.base import HINT, View
from kvscope_telemetry.whole_file import write_whole

_MARGIN: Final = 12
_FLAGS: Final = QWidget.RenderFlag.DrawWindowBackground | QWidget.RenderFlag.DrawChildren


@dataclass(frozen=True, slots=True)
class PictureLook:
    """How a picture is made of a view."""

    scale: int = 1
    """Pixels of the picture for one of the screen, along a side."""
    theme: Theme | None = None
    """None: as it is shown."""
    caption: str = ""
    """A line below it; empty for none."""


def picture_of(view: View, look: PictureLook | None = None) -> QImage:
    """`view` as it is shown now."""
    look = look or PictureLook()
    scale = view.devicePixelRatioF() * look.scale
    image = QImage(picture_size(view, look), QImage.Format.Format_RGB32)
    with _in_theme(view, look.theme):
        painter = QPainter(image)
        try:
            painter.scale(scale, scale)
            _paint(painter, view, look)
        finally:
            painter.end()
    image.setDevicePixelRatio(1.0)
    return image


def picture_size(view: View, look: PictureLook) -> QSize:
    """Of the picture that `picture_of` would make."""
    return (_size(view, look).toSizeF() * (view.devicePixelRatioF() * look.scale)).toSize()


def svg_of(view: View, look: PictureLook | None = None) -> QByteArray:
    """The same as SVG: words and lines stay such; what is a bitmap in the view is one in it."""
    from kvscope_app.pictures.svg_file import svg_painter  # most windows need none of it

    look = look or PictureLook()
    with _in_theme(view, look.theme), svg_painter(_size(view, look), view.title) as (painter, made):
        _paint(painter, view, look)
    return made()


@dataclass(frozen=True, slots=True)
class Taken:
    """A picture of what a person saw when asking for it, in both forms: where it goes is asked afterwards."""

    image: QImage
    drawing: bytes

    @classmethod
    def of(cls, view: View, look: PictureLook | None = None) -> Taken:
        """Now."""
        return cls(picture_of(view, look), bytes(svg_of(view, look).data()))

    def save(self, path: Path) -> str:
        """Save the drawing (.svg) or the image, in place of an earlier file. Returns why that failed, or nothing."""
        try:
            write_whole(path, self.drawing if path.suffix.lower() == ".svg" else png_of(self.image))
        except OSError as error:
            return error.strerror or str(error)
        return ""


def png_of(image: QImage) -> bytes:
    """As a file."""
    buffer = QBuffer()
    buffer.open(QIODevice.OpenModeFlag.WriteOnly)
    QImageWriter(buffer, QByteArray(b"png")).write(image)
    return bytes(buffer.data().data())


def copy_picture(view: View, look: PictureLook | None = None) -> None:
    """Put it into the clipboard."""
    QApplication.clipboard().setImage(picture_of(view, look))


def caption_height(view: View) -> int:
    """Of the line below a picture, before scaling."""
    return round(QFontMetricsF(sans(0.92)).height()) + _MARGIN


def _size(view: View, look: PictureLook) -> QSize:
    return view.size() + QSize(0, caption_height(view) if look.caption else 0)


def _paint(painter: QPainter, view: View, look: PictureLook) -> None:
    theme = look.theme or view.theme
    painter.fillRect(QRect(QPoint(), _size(view, look)), QColor(theme.panel))
    view.render(painter, QPoint(), renderFlags=_FLAGS)
    _leave_out_controls(painter, view)
    if look.caption:
        strip = QRect(0, view.height(), view.width(), caption_height(view))
        painter.fillRect(strip, QColor(theme.panel))  # SVG has no clipping: parts may have painted there
        box = QRectF(_MARGIN, view.height(), view.width() - 2 * _MARGIN, caption_height(view) - 4)
        painter.setFont(sans(0.92))
        painter.setPen(QColor(theme.muted))
        words = painter.fontMetrics().elidedText(look.caption, Qt.TextElideMode.ElideRight, round(box.width()))
        painter.drawText(box, Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter, words)


def _leave_out_controls(painter: QPainter, view: View) -> None:
    """Nobody presses a button in a picture. They are painted over, not hidden: what is around them stays in place."""
    shown = [each for each in view.findChildren(QWidget) if each.isVisible() and is_control(each)]
    controls = [each for each in shown if not any(each is not other and other.isAncestorOf(each) for other in shown)]
    if not controls:
        return
    seen = QImage(view.size(), QImage.Format.Format_RGB32)
    view.render(seen, QPoint(), renderFlags=_FLAGS)
    for control in controls:
        around = control.parentWidget() or view
        box = QRect(control.mapTo(view, QPoint()), control.size())
        box &= around.visibleRegion().boundingRect().translated(around.mapTo(view, QPoint()))
        beside = QPoint(box.left() - 2 if box.left() >= 2 else box.right() + 2, box.center().y())
        if not box.isEmpty() and seen.rect().contains(beside):
            painter.fillRect(box, seen.pixelColor(beside))


def is_control(widget: QWidget) -> bool:
    """Whether `widget` is of use only to a person at the window."""
    kinds = (QAbstractButton, QComboBox, QLineEdit, QScrollBar, SegmentedControl)
    return isinstance(widget, kinds) or widget.property(HINT) is True


@contextmanager
def _in_theme(view: View, theme: Theme | None) -> Iterator[None]:
    """`view` in `theme`, and back: nobody sees it, nothing is painted in between."""
    before = view.theme
    if theme is None or theme is before:
        yield
        return
    app = QApplication.instance()
    assert isinstance(app, QApplication), "no application"
    try:
        apply_theme(app, theme)  # palette and stylesheet are the application's: a widget's own would not reach all
        view.apply_theme(theme)
        yield
    finally:
        apply_theme(app, before)
        view.apply_theme(before)
