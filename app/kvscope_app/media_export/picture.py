"""Picture of a view as an image or an SVG file, in the view's own theme or another one.

Owns the picture's size and the caption below it. Works with any `View`, because the view paints itself.

Bitmaps in a view (cells of the page map, heatmap, lanes) are enlarged without smoothing, so that a pixel of the screen
becomes a square of the picture. Text and lines are drawn at the picture's own scale.
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

from kvscope_app.ui.fonts import sans
from kvscope_app.ui.theme import Theme
from kvscope_app.ui.theming.apply_theme import apply_theme
from kvscope_app.ui.widgets import SegmentedControl
from kvscope_app.views.base import HINT, View
from kvscope_telemetry.whole_file import write_whole

_MARGIN: Final = 12
_FLAGS: Final = QWidget.RenderFlag.DrawWindowBackground | QWidget.RenderFlag.DrawChildren


@dataclass(frozen=True, slots=True)
class PictureStyle:
    scale: int = 1
    """Pixels of the picture per pixel of the screen, in each direction."""
    theme: Theme | None = None
    """Theme of the picture; None keeps the theme in which the view is shown."""
    caption: str = ""


def picture_of(view: View, style: PictureStyle | None = None) -> QImage:
    style = style or PictureStyle()
    scale = view.devicePixelRatioF() * style.scale
    image = QImage(picture_size(view, style), QImage.Format.Format_RGB32)
    with _in_theme(view, style.theme):
        painter = QPainter(image)
        try:
            painter.scale(scale, scale)
            _paint(painter, view, style)
        finally:
            painter.end()
    image.setDevicePixelRatio(1.0)
    return image


def picture_size(view: View, style: PictureStyle) -> QSize:
    return (_size(view, style).toSizeF() * (view.devicePixelRatioF() * style.scale)).toSize()


def svg_of(view: View, style: PictureStyle | None = None) -> QByteArray:
    from kvscope_app.media_export.svg_file import svg_painter  # imported late, because few windows need it

    style = style or PictureStyle()
    with _in_theme(view, style.theme), svg_painter(_size(view, style), view.title) as (painter, svg_bytes):
        _paint(painter, view, style)
    return svg_bytes()


@dataclass(frozen=True, slots=True)
class RenderedPicture:
    """Bitmap and SVG of a view, rendered before the user chooses a file name, whose suffix selects one of them."""

    image: QImage
    drawing: bytes

    @classmethod
    def of(cls, view: View, style: PictureStyle | None = None) -> RenderedPicture:
        return cls(picture_of(view, style), bytes(svg_of(view, style).data()))

    def save(self, path: Path) -> str:
        """Write an SVG file (for `.svg`) or a PNG file to `path`, replacing an existing file. Returns an error text, or
        "".
        """
        try:
            write_whole(path, self.drawing if path.suffix.lower() == ".svg" else png_of(self.image))
        except OSError as error:
            return error.strerror or str(error)
        return ""


def png_of(image: QImage) -> bytes:
    buffer = QBuffer()
    buffer.open(QIODevice.OpenModeFlag.WriteOnly)
    QImageWriter(buffer, QByteArray(b"png")).write(image)
    return bytes(buffer.data().data())


def copy_picture(view: View, style: PictureStyle | None = None) -> None:
    QApplication.clipboard().setImage(picture_of(view, style))


def caption_height(view: View) -> int:
    """Return the height of the caption line in pixels, before scaling."""
    return round(QFontMetricsF(sans(0.92)).height()) + _MARGIN


def _size(view: View, style: PictureStyle) -> QSize:
    return view.size() + QSize(0, caption_height(view) if style.caption else 0)


def _paint(painter: QPainter, view: View, style: PictureStyle) -> None:
    theme = style.theme or view.theme
    painter.fillRect(QRect(QPoint(), _size(view, style)), QColor(theme.panel))
    view.render(painter, QPoint(), renderFlags=_FLAGS)
    _cover_controls(painter, view)
    if style.caption:
        strip = QRect(0, view.height(), view.width(), caption_height(view))
        painter.fillRect(strip, QColor(theme.panel))  # QSvgGenerator does not clip: a child may have painted here
        box = QRectF(_MARGIN, view.height(), view.width() - 2 * _MARGIN, caption_height(view) - 4)
        painter.setFont(sans(0.92))
        painter.setPen(QColor(theme.muted))
        text = painter.fontMetrics().elidedText(style.caption, Qt.TextElideMode.ElideRight, round(box.width()))
        painter.drawText(box, Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter, text)


def _cover_controls(painter: QPainter, view: View) -> None:
    """Paint over buttons and other controls, which are useless in a picture.

    Hiding the controls instead would move the widgets around them.
    """
    visible = [each for each in view.findChildren(QWidget) if each.isVisible() and is_control(each)]
    controls = [
        each for each in visible if not any(each is not other and other.isAncestorOf(each) for other in visible)
    ]
    if not controls:
        return
    rendered = QImage(view.size(), QImage.Format.Format_RGB32)
    view.render(rendered, QPoint(), renderFlags=_FLAGS)
    for control in controls:
        parent = control.parentWidget() or view
        box = QRect(control.mapTo(view, QPoint()), control.size())
        box &= parent.visibleRegion().boundingRect().translated(parent.mapTo(view, QPoint()))
        sample = QPoint(box.left() - 2 if box.left() >= 2 else box.right() + 2, box.center().y())
        if not box.isEmpty() and rendered.rect().contains(sample):
            painter.fillRect(box, rendered.pixelColor(sample))


def is_control(widget: QWidget) -> bool:
    kinds = (QAbstractButton, QComboBox, QLineEdit, QScrollBar, SegmentedControl)
    return isinstance(widget, kinds) or widget.property(HINT) is True


@contextmanager
def _in_theme(view: View, theme: Theme | None) -> Iterator[None]:
    """Show `view` in `theme` while the context is open. The screen is not repainted."""
    old_theme = view.theme
    if theme is None or theme is old_theme:
        yield
        return
    app = QApplication.instance()
    assert isinstance(app, QApplication), "no application"
    try:
        apply_theme(app, theme)  # palette and stylesheet of the view alone would not reach all of its widgets
        view.apply_theme(theme)
        yield
    finally:
        apply_theme(app, old_theme)
        view.apply_theme(old_theme)
