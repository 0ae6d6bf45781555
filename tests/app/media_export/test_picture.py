"""Tests that a picture of a view equals what the view shows, at any scale, in both themes and with a caption."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PySide6.QtCore import QPoint, QSize
from PySide6.QtGui import QImage
from PySide6.QtWidgets import QAbstractButton, QApplication

from kvscope_app.media_export.picture import (
    PictureStyle,
    RenderedPicture,
    caption_height,
    copy_picture,
    picture_of,
    svg_of,
)
from kvscope_app.media_export.svg_file import svg_painter
from kvscope_app.ui.theme import THEMES
from kvscope_app.ui.widgets import SegmentedControl
from kvscope_app.views.chart.panel import ChartPanel, CurveSpec
from kvscope_app.views.page_map.page_map_view import PageMapView


@pytest.fixture
def view(session, themes, qtbot):
    view = PageMapView(session)
    qtbot.addWidget(view)
    view.resize(420, 360)
    view.apply_theme(themes.theme)
    view.show()
    view.refresh()
    return view


def pixels(image):
    image = image.convertToFormat(QImage.Format.Format_RGB888)
    lines = np.frombuffer(image.constBits(), np.uint8).reshape(image.height(), image.bytesPerLine())
    return np.array(lines[:, : image.width() * 3]).reshape(image.height(), image.width(), 3)


def cells(view, shown, scale=1):
    """Return the part of the picture that contains cells and no text."""
    rect = view.canvas.geometry()
    gutter = view.canvas.gutter
    return shown[
        scale * rect.top() : scale * (rect.top() + 40), scale * (rect.left() + gutter) : scale * (rect.right() - 40)
    ]


def test_picture_equals_the_view_without_its_controls(view):
    shown, drawn = pixels(view.grab().toImage()), pixels(picture_of(view))
    controls = [each for each in view.findChildren(QAbstractButton) if each.isVisible()]
    assert controls
    for control in controls:
        at = control.mapTo(view, QPoint())
        here = np.s_[at.y() : at.y() + control.height(), at.x() : at.x() + control.width()]
        assert np.unique(drawn[here].reshape(-1, 3), axis=0).shape[0] == 1, control.accessibleName()
    frame = view.findChild(SegmentedControl)
    at = frame.mapTo(view, QPoint())
    here = np.s_[at.y() : at.y() + frame.height(), at.x() : at.x() + frame.width()]
    drawn[here] = shown[here]
    for control in controls:
        at = control.mapTo(view, QPoint())
        here = np.s_[at.y() : at.y() + control.height(), at.x() : at.x() + control.width()]
        drawn[here] = shown[here]
    assert np.array_equal(drawn, shown)
    assert np.array_equal(pixels(view.grab().toImage()), shown), "the view must keep its controls"


@pytest.mark.parametrize("scale", [2, 3])
def test_scaled_picture_repeats_each_map_pixel(view, scale):
    small, large = pixels(picture_of(view)), pixels(picture_of(view, PictureStyle(scale)))
    assert large.shape == (view.height() * scale, view.width() * scale, 3)
    repeated = cells(view, small).repeat(scale, axis=0).repeat(scale, axis=1)
    drawn = cells(view, large, scale)[: repeated.shape[0], : repeated.shape[1]]
    assert (drawn == repeated).all(axis=2).mean() > 0.9  # numbers in cells are drawn at the higher resolution


def test_picture_in_another_theme_leaves_the_view_unchanged(view, qapp):
    before, sheet = pixels(picture_of(view)), qapp.styleSheet()
    light = pixels(picture_of(view, PictureStyle(theme=THEMES["light"])))
    assert light[2, 2].mean() > 200 > before[2, 2].mean()
    assert (view.theme, qapp.styleSheet()) == (THEMES["dark"], sheet)
    assert np.array_equal(pixels(picture_of(view)), before)


def test_caption_is_added_below_the_view(view):
    plain, captioned = pixels(picture_of(view)), pixels(picture_of(view, PictureStyle(caption="a model · at noon")))
    assert captioned.shape[0] == plain.shape[0] + caption_height(view)
    assert np.array_equal(captioned[: plain.shape[0]], plain)
    assert len(np.unique(captioned[plain.shape[0] :].reshape(-1, 3), axis=0)) > 3


def test_svg_contains_text_and_unsmoothed_images(view):
    root = ElementTree.fromstring(svg_of(view, PictureStyle(caption="a model")).data())
    assert (root.get("width"), root.get("height")) == (str(view.width()), str(view.height() + caption_height(view)))
    words = "".join(root.itertext())
    assert "Page map" in words
    assert "a model" in words
    images = [element for element in root.iter() if element.tag.endswith("image")]
    assert images
    assert all("pixelated" in str(image.get("style")) for image in images)


def test_picture_is_copied_to_the_clipboard_at_its_scale(view):
    copy_picture(view, PictureStyle(2))
    assert QApplication.clipboard().image().size() == view.size() * 2


def test_picture_format_follows_the_file_suffix(view, tmp_path):
    taken = RenderedPicture.of(view)
    for name in ("x.png", "x.svg", "plain"):
        assert taken.save(tmp_path / name) == ""
    assert QImage(str(tmp_path / "x.png")).size() == QImage(str(tmp_path / "plain")).size() == view.size()
    assert (tmp_path / "x.svg").read_bytes().startswith(b"<?xml")
    assert taken.save(tmp_path / "nowhere" / "x.png") == "No such file or directory"
    assert taken.save(Path("/dev/null")) == "it is a device, not a file"


def test_svg_curves_at_large_times_keep_their_precision(qtbot, themes):
    """Qt writes numbers to SVG with six digits."""
    panel = ChartPanel("Curve", (CurveSpec("y", "", 0),), str)
    qtbot.addWidget(panel)
    panel.resize(400, 200)
    panel.apply_theme(themes.theme)
    panel.show()
    x = 123_456_789.0 + np.arange(100) * 0.1
    panel.show_time(x[0], x[-1], None)
    panel.show_curve("y", x, np.arange(100) % 7 / 7, 0)
    panel.finish_layout()
    with svg_painter(panel.size(), "x") as (painter, made):
        panel.render(painter, QPoint())
    drawn = made().data().decode()
    longest = max(re.findall(r'd="(M[^"]*)"', drawn), key=len)
    columns = [float(pair.split(",")[0]) for pair in re.findall(r"[ML]([\d.,e+-]+)", longest)]
    assert len(columns) == 100
    assert np.allclose(np.diff(columns), np.diff(columns).mean(), rtol=0.01)


def test_svg_of_text_with_control_characters_is_well_formed(qapp):
    text = "id\0\x01\x1b[2J\x0b\ufffe\ud800]]><&"
    with svg_painter(QSize(200, 50), f"title {text}") as (painter, made):
        painter.drawText(5, 20, text)
    root = ElementTree.fromstring(made().data())
    texts = [element.text or "" for element in root.iter() if element.text and "id" in element.text]
    assert len(texts) == 2
    assert all("[2J" in each and each.endswith("<&") for each in texts)
