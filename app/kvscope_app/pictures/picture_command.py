"""`kvscope export` to a picture or a video, without a display. Owns the defaults and which moments are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import BinaryIO

import numpy as np
from PySide6.QtCore import QSize
from PySide6.QtGui import QImage

from kvscope_app.look.theme import THEMES
from kvscope_app.pictures.encoders import Film, Frame, encode, require_encoder
from kvscope_app.pictures.names import STILLS, VIDEO_VIEWS
from kvscope_app.pictures.picture import PictureLook, png_of, svg_of
from kvscope_app.pictures.stage import Stage, offscreen_application
from kvscope_app.pictures.wish import PictureWish
from kvscope_app.views.docks import VIEWS_ON_TIME
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.exports.new_file import new_file
from kvscope_telemetry.exports.span import Span, span_of
from kvscope_telemetry.recorded import Recorded

Watch = Callable[[float], bool]


def make(recording: Recorded, wish: PictureWish, watch: Watch) -> None:
    """Write it. Raises BadInput and KvscopeError in one line; then nothing is left of it."""
    span = span_of(recording, wish.from_s, wish.until_s)
    if wish.suffix in STILLS:
        _make_still(recording, wish, span, watch)
    else:
        _make_video(recording, wish, span, watch)


def moments(span: Span, speed: float, fps: float) -> tuple[int, Iterator[float]]:
    """How many frames a video of `span` has, and the second of the recording that each shows."""
    step_s = speed / fps
    num_frames = int(span.length_s / step_s + 1e-6) + 1
    return num_frames, (min(span.from_s + number * step_s, span.until_s) for number in range(num_frames))


def _make_still(recording: Recorded, wish: PictureWish, span: Span, watch: Watch) -> None:
    at_s = span.until_s if wish.at_s is None else wish.at_s
    if at_s > (recording.end_ns - recording.start_ns) / 1e9:
        raise BadInput(f"--at {at_s:g} is after the end of the recording, which is {span.until_s:.1f} s long")
    offscreen_application(wish.scale)
    with new_file(wish.path) as file:
        stage = _stage(recording, wish, watch)
        try:
            stage.go_to(at_s)
            if wish.has_range:
                stage.show_range(span.from_s, span.until_s)
                stage.go_to(at_s)
            _write_still(stage, _look(stage, wish, span if wish.has_range else None), wish.suffix, file)
        finally:
            stage.close()


def _write_still(stage: Stage, look: PictureLook, suffix: str, file: BinaryIO) -> None:
    if suffix == ".svg":
        file.write(svg_of(stage.view, look).data())
    else:
        file.write(png_of(stage.picture(look)))


def _make_video(recording: Recorded, wish: PictureWish, span: Span, watch: Watch) -> None:
    if wish.view not in VIDEO_VIEWS:
        raise BadInput(f"a video of {wish.view} is not accepted: one of {', '.join(VIDEO_VIEWS)}")
    if wish.at_s is not None:
        raise BadInput("--at applies to a picture; use --from and --until for a video")
    num_frames, shown = moments(span, wish.speed, wish.fps)
    if num_frames < 2:
        raise BadInput(
            f"{span.length_s:.2f} s at {wish.speed:g} × and {wish.fps:g} fps has only one frame: too short for a video"
        )
    offscreen_application(wish.scale)
    require_encoder(wish.suffix, num_frames, wish.size[0] * wish.scale, wish.size[1] * wish.scale)
    with new_file(wish.path) as file:
        stage = _stage(recording, wish, watch)
        try:
            stage.go_to(span.from_s)
            if wish.view in VIEWS_ON_TIME and wish.has_range:
                stage.show_range(span.from_s, span.until_s)
                stage.go_to(span.from_s)
            frames = _frames(stage, wish, shown, num_frames, watch)
            first = next(frames)
            film = Film(_with(first, frames), num_frames, wish.fps, first.shape[1], first.shape[0])
            encode(film, wish.suffix, file)
        finally:
            stage.close()


def _frames(stage: Stage, wish: PictureWish, shown: Iterator[float], num: int, watch: Watch) -> Iterator[Frame]:
    for number, at_s in enumerate(shown):
        stage.now_ns = round(number / wish.fps * 1e9)
        stage.play_to(at_s)
        watch(stage.begin_share + (1 - stage.begin_share) * number / num)
        yield _pixels(stage.picture(_look(stage, wish, None)))


def _with(first: Frame, rest: Iterator[Frame]) -> Iterator[Frame]:
    yield first
    yield from rest


def _pixels(image: QImage) -> Frame:
    """Red, green and blue of each, shape (height, width, 3)."""
    image = image.convertToFormat(QImage.Format.Format_RGB888)
    lines = np.frombuffer(image.constBits(), np.uint8).reshape(image.height(), image.bytesPerLine())
    # A copy: the image goes, and its bytes with it.
    return np.array(lines[:, : image.width() * 3]).reshape(image.height(), image.width(), 3)


def _stage(recording: Recorded, wish: PictureWish, watch: Watch) -> Stage:
    return Stage(recording, wish.view, QSize(*wish.size), THEMES[wish.theme], watch)


def _look(stage: Stage, wish: PictureWish, span: Span | None) -> PictureLook:
    """The application is scaled already."""
    if not wish.captioned:
        return PictureLook()
    return PictureLook(caption=stage.caption(None if span is None else (span.from_s, span.until_s)))
