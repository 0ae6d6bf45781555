"""Makes pictures and videos for `kvscope export`, without a display.

Decides the default sizes and the moments of the recording that are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import BinaryIO, Final

import numpy as np
from PySide6.QtCore import QSize
from PySide6.QtGui import QImage

from kvscope_app.media_export.content_fit import hidden_content_text
from kvscope_app.media_export.encoders import Frame, VideoFrames, encode, require_encoder
from kvscope_app.media_export.media_names import STILL_SUFFIXES, VIDEO_VIEWS
from kvscope_app.media_export.offscreen_view import OffscreenView, offscreen_application
from kvscope_app.media_export.picture import PictureStyle, caption_height, png_of, svg_of
from kvscope_app.media_export.picture_spec import DEFAULT_SIZE, PictureSpec
from kvscope_app.ui.theme import THEMES
from kvscope_app.views.docks import VIEWS_ON_TIME
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.exports.new_file import is_stream, new_file
from kvscope_telemetry.exports.span import Span, span_of
from kvscope_telemetry.recordings.reader import Recording

ProgressCallback = Callable[[float], bool]
_MAX_FITTED_SIZE: Final = (1920, 2400)
"""Maximum width and height in pixels to which a picture without `--size` grows to show all rows of a list."""


def export_picture(recording: Recording, spec: PictureSpec, report_progress: ProgressCallback) -> None:
    """Write the picture or video that `spec` describes.

    Raises:
        BadInput, KvscopeError: The file could not be made. No incomplete file is left.
    """
    span = span_of(recording, spec.from_s, spec.until_s)
    if spec.suffix in STILL_SUFFIXES:
        _make_still(recording, spec, span, report_progress)
    else:
        _make_video(recording, spec, span, report_progress)


def frame_times(span: Span, speed: float, fps: float) -> tuple[int, Iterator[float]]:
    """Return the number of frames of a video of `span`, and the time in seconds of the recording that each frame shows.

    The video takes `span.length_s / speed` seconds. Its first frame shows the start of the span, its last one the end.
    """
    num_frames = round(span.length_s / speed * fps)
    return num_frames, iter(np.linspace(span.from_s, span.until_s, num_frames).tolist())


def _make_still(recording: Recording, spec: PictureSpec, span: Span, report_progress: ProgressCallback) -> None:
    at_s = span.until_s if spec.at_s is None else spec.at_s
    if at_s > (recording.end_ns - recording.start_ns) / 1e9:
        raise BadInput(f"--at {at_s:g} is after the end of the recording, which is {span.until_s:.1f} s long")
    offscreen_application(spec.scale)
    with new_file(spec.path) as file:
        view = _open_view(recording, spec, report_progress)
        try:
            view.go_to(at_s)
            if spec.has_range:
                view.show_range(span.from_s, span.until_s)
                view.go_to(at_s)
            caption_span = span if spec.has_range else None
            if spec.size is None:
                view.fit_contents(QSize(*_MAX_FITTED_SIZE))
                view.go_to(at_s)
            elif _style(view, spec, caption_span).caption:
                _leave_space_for_caption(view)
                view.go_to(at_s)
            _write_still(view, _style(view, spec, caption_span), spec.suffix, file)
        finally:
            view.close()


def _leave_space_for_caption(view: OffscreenView) -> None:
    view.resize(view.view.size() - QSize(0, caption_height(view.view)))


def _write_still(view: OffscreenView, style: PictureStyle, suffix: str, file: BinaryIO) -> None:
    if suffix == ".svg":
        file.write(svg_of(view.view, style).data())
    else:
        file.write(png_of(view.picture(style)))


def _make_video(recording: Recording, spec: PictureSpec, span: Span, report_progress: ProgressCallback) -> None:
    if spec.view not in VIDEO_VIEWS:
        raise BadInput(f"a video of {spec.view} is not accepted: must be one of {', '.join(VIDEO_VIEWS)}")
    if spec.at_s is not None:
        raise BadInput("--at applies to a picture; use --from and --until for a video")
    if is_stream(spec.path):
        raise BadInput(f"a video is written to a file, not to {str(spec.path)!r}")
    num_frames, times_s = frame_times(span, spec.speed, spec.fps)
    if num_frames < 2:
        raise BadInput(
            f"{span.length_s:.2f} s at {spec.speed:g} × and {spec.fps:g} fps is too short for a video:"
            " less than two frames"
        )
    offscreen_application(spec.scale)
    width, height = spec.size or DEFAULT_SIZE
    require_encoder(spec.suffix, num_frames, width * spec.scale, height * spec.scale)
    with new_file(spec.path) as file:
        view = _open_view(recording, spec, report_progress)
        try:
            if spec.captioned:
                _leave_space_for_caption(view)
            view.go_to(span.from_s)
            if spec.view in VIEWS_ON_TIME and spec.has_range:
                view.show_range(span.from_s, span.until_s)
                view.go_to(span.from_s)
            frames = _frames(view, spec, times_s, num_frames, report_progress)
            first = next(frames)
            video = VideoFrames(chain((first,), frames), num_frames, spec.fps, first.shape[1], first.shape[0])
            encode(video, spec.suffix, file)
        finally:
            view.close()


def _frames(
    view: OffscreenView, spec: PictureSpec, times_s: Iterator[float], num_frames: int, report_progress: ProgressCallback
) -> Iterator[Frame]:
    for number, at_s in enumerate(times_s):
        view.now_ns = round(number / spec.fps * 1e9)
        view.play_to(at_s)
        report_progress(view.setup_share + (1 - view.setup_share) * number / num_frames)
        yield _pixels(view.picture(_style(view, spec, None)))


def _pixels(image: QImage) -> Frame:
    image = image.convertToFormat(QImage.Format.Format_RGB888)
    lines = np.frombuffer(image.constBits(), np.uint8).reshape(image.height(), image.bytesPerLine())
    # Copied, because the bytes are freed with the image.
    return np.array(lines[:, : image.width() * 3]).reshape(image.height(), image.width(), 3)


def _open_view(recording: Recording, spec: PictureSpec, report_progress: ProgressCallback) -> OffscreenView:
    return OffscreenView(recording, spec.view, QSize(*(spec.size or DEFAULT_SIZE)), THEMES[spec.theme], report_progress)


def _style(view: OffscreenView, spec: PictureSpec, span: Span | None) -> PictureStyle:
    """Return the style of a picture.

    Its caption has the model, view and time (or `span`) if `spec` requests a caption, and always says what a still
    picture had no space for.
    """
    notes = [view.caption(None if span is None else (span.from_s, span.until_s))] if spec.captioned else []
    if spec.suffix in STILL_SUFFIXES and (note := hidden_content_text(view.view)):
        notes.append(note)
    return PictureStyle(caption="  ·  ".join(notes))
