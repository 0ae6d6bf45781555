"""Makes pictures and videos for `kvscope export`, without a display.

Owns the default sizes and which moments are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import BinaryIO, Final

import numpy as np
from PySide6.QtCore import QSize
from PySide6.QtGui import QImage

from kvscope_app.media_export.content_fit import hidden_note
from kvscope_app.media_export.encoders import Frame, VideoEncoder, encode, require_encoder
from kvscope_app.media_export.media_names import STILLS, VIDEO_VIEWS
from kvscope_app.media_export.offscreen_view import OffscreenView, offscreen_application
from kvscope_app.media_export.picture import PictureStyle, caption_height, png_of, svg_of
from kvscope_app.media_export.picture_spec import DEFAULT_SIZE, PictureSpec
from kvscope_app.ui.theme import THEMES
from kvscope_app.views.docks import VIEWS_ON_TIME
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.exports.new_file import is_stream, new_file
from kvscope_telemetry.exports.span import Span, span_of
from kvscope_telemetry.recordings.reader import Recording

Watch = Callable[[float], bool]
_LARGEST_FIT: Final = (1920, 2400)
"""Maximum size in pixels to which a picture without `--size` grows to show all rows of a list."""


def make(recording: Recording, wish: PictureSpec, watch: Watch) -> None:
    """Write the picture or video. On BadInput and KvscopeError, whose texts are one line, no file is left."""
    span = span_of(recording, wish.from_s, wish.until_s)
    if wish.suffix in STILLS:
        _make_still(recording, wish, span, watch)
    else:
        _make_video(recording, wish, span, watch)


def moments(span: Span, speed: float, fps: float) -> tuple[int, Iterator[float]]:
    """Return the number of frames of a video of `span`, and the second of the recording that each frame shows.

    The video lasts `span.length_s / speed`; its first frame shows the start of the span, its last one the end.
    """
    num_frames = round(span.length_s / speed * fps)
    return num_frames, iter(np.linspace(span.from_s, span.until_s, num_frames).tolist())


def _make_still(recording: Recording, wish: PictureSpec, span: Span, watch: Watch) -> None:
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
            shown = span if wish.has_range else None
            if wish.size is None:
                stage.fit_contents(QSize(*_LARGEST_FIT))
                stage.go_to(at_s)
            elif _look(stage, wish, shown).caption:
                _leave_space_for_caption(stage)
                stage.go_to(at_s)
            _write_still(stage, _look(stage, wish, shown), wish.suffix, file)
        finally:
            stage.close()


def _leave_space_for_caption(stage: OffscreenView) -> None:
    """Make the view smaller, so that the picture including its caption has the requested size."""
    stage.resize(stage.view.size() - QSize(0, caption_height(stage.view)))


def _write_still(stage: OffscreenView, look: PictureStyle, suffix: str, file: BinaryIO) -> None:
    if suffix == ".svg":
        file.write(svg_of(stage.view, look).data())
    else:
        file.write(png_of(stage.picture(look)))


def _make_video(recording: Recording, wish: PictureSpec, span: Span, watch: Watch) -> None:
    if wish.view not in VIDEO_VIEWS:
        raise BadInput(f"a video of {wish.view} is not accepted: one of {', '.join(VIDEO_VIEWS)}")
    if wish.at_s is not None:
        raise BadInput("--at applies to a picture; use --from and --until for a video")
    if is_stream(wish.path):
        raise BadInput(f"a video is written to a file, not to {str(wish.path)!r}")
    num_frames, shown = moments(span, wish.speed, wish.fps)
    if num_frames < 2:
        raise BadInput(
            f"{span.length_s:.2f} s at {wish.speed:g} × and {wish.fps:g} fps is too short for a video:"
            " less than two frames"
        )
    offscreen_application(wish.scale)
    width, height = wish.size or DEFAULT_SIZE
    require_encoder(wish.suffix, num_frames, width * wish.scale, height * wish.scale)
    with new_file(wish.path) as file:
        stage = _stage(recording, wish, watch)
        try:
            if wish.captioned:
                _leave_space_for_caption(stage)
            stage.go_to(span.from_s)
            if wish.view in VIEWS_ON_TIME and wish.has_range:
                stage.show_range(span.from_s, span.until_s)
                stage.go_to(span.from_s)
            frames = _frames(stage, wish, shown, num_frames, watch)
            first = next(frames)
            film = VideoEncoder(_with(first, frames), num_frames, wish.fps, first.shape[1], first.shape[0])
            encode(film, wish.suffix, file)
        finally:
            stage.close()


def _frames(stage: OffscreenView, wish: PictureSpec, shown: Iterator[float], num: int, watch: Watch) -> Iterator[Frame]:
    for number, at_s in enumerate(shown):
        stage.now_ns = round(number / wish.fps * 1e9)
        stage.play_to(at_s)
        watch(stage.begin_share + (1 - stage.begin_share) * number / num)
        yield _pixels(stage.picture(_look(stage, wish, None)))


def _with(first: Frame, rest: Iterator[Frame]) -> Iterator[Frame]:
    yield first
    yield from rest


def _pixels(image: QImage) -> Frame:
    """Return the RGB pixels of an image, shape (height, width, 3)."""
    image = image.convertToFormat(QImage.Format.Format_RGB888)
    lines = np.frombuffer(image.constBits(), np.uint8).reshape(image.height(), image.bytesPerLine())
    # Copied, because the bytes are freed with the image.
    return np.array(lines[:, : image.width() * 3]).reshape(image.height(), image.width(), 3)


def _stage(recording: Recording, wish: PictureSpec, watch: Watch) -> OffscreenView:
    return OffscreenView(recording, wish.view, QSize(*(wish.size or DEFAULT_SIZE)), THEMES[wish.theme], watch)


def _look(stage: OffscreenView, wish: PictureSpec, span: Span | None) -> PictureStyle:
    """Return the options of a picture.

    Its caption describes what is shown, if requested, and names what a still picture had no space for.
    """
    notes = [stage.caption(None if span is None else (span.from_s, span.until_s))] if wish.captioned else []
    if wish.suffix in STILLS and (note := hidden_note(stage.view)):
        notes.append(note)
    return PictureStyle(caption="  ·  ".join(notes))
