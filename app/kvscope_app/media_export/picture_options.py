"""Options of `kvscope export` for pictures and videos. Imports no Qt."""

from __future__ import annotations

import argparse
import math
import re
from typing import Any, Final

from kvscope_app.media_export.media_names import MAX_SCALE, MAX_SIDE_PX, MIN_SIDE_PX, STILL_SUFFIXES, VIEWS, suffix_of
from kvscope_app.media_export.picture_spec import PictureSpec
from kvscope_app.option_values import parse_moment
from kvscope_telemetry.errors import BadInput

_OPTIONS: Final = ("view", "at_s", "speed", "fps", "size", "scale", "theme", "caption")
_VIDEO_OPTIONS: Final = ("speed", "fps")
_SPEED_RANGE, _FPS_RANGE = (0.01, 1000.0), (1.0, 60.0)


def add_picture_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("pictures and videos")
    group.add_argument(
        "--view",
        choices=VIEWS,
        help="view to draw (default: page-map); the console and selections can be saved in the window with"
        " Ctrl+Shift+S",
    )
    group.add_argument(
        "--at",
        dest="at_s",
        metavar="S",
        type=parse_moment,
        help="one picture: seconds from the start (default: the end)",
    )
    group.add_argument(
        "--speed", metavar="X", type=_parse_speed, help="video: recorded seconds per second (default: 1)"
    )
    group.add_argument("--fps", metavar="N", type=_parse_fps, help="video: frames per second, 1 to 60 (default: 10)")
    group.add_argument(
        "--size",
        metavar="WxH",
        type=_parse_size,
        help="size in pixels before scaling (default: 960x600; larger for a picture if its content needs it)",
    )
    group.add_argument(
        "--scale", metavar="N", type=int, choices=range(1, MAX_SCALE + 1), help="scale factor (default: 1)"
    )
    group.add_argument("--theme", choices=("dark", "light"), help="colour theme (default: dark)")
    group.add_argument("--caption", action="store_true", help="add a caption: model, time, range")
    group.add_argument("--tell-progress", action="store_true", help=argparse.SUPPRESS)


def picture_spec(args: argparse.Namespace, *, is_wanted: bool = True) -> PictureSpec | None:
    """Return the picture or video that the options request; None if `is_wanted` is false.

    Raises BadInput for options that exclude each other and, if no picture is wanted, for any picture option.
    """
    arguments = {name: getattr(args, name) for name in _OPTIONS if getattr(args, name) not in (None, False)}
    if not is_wanted:
        if arguments:
            raise BadInput(f"{_flag(next(iter(arguments)))} applies to pictures and videos: --to png, svg or video")
        return None
    suffix = suffix_of(args.out, args.to)
    for name in _VIDEO_OPTIONS:
        if name in arguments and suffix in STILL_SUFFIXES:
            raise BadInput(f"{_flag(name)} is for videos and cannot go with {suffix}")
    if args.kind is not None:
        raise BadInput(f"a kind ({args.kind}) goes with tables, not with {suffix}")
    return PictureSpec(args.out, suffix, from_s=args.from_s, until_s=args.until_s, **_spec_fields(arguments))


def _spec_fields(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"captioned" if name == "caption" else name: value for name, value in arguments.items()}


def _flag(name: str) -> str:
    return "--" + name.removesuffix("_s")


def _parse_speed(text: str) -> float:
    return _parse_between(text, *_SPEED_RANGE, "playback speed")


def _parse_fps(text: str) -> float:
    return _parse_between(text, *_FPS_RANGE, "frames per second")


def _parse_between(text: str, minimum: float, maximum: float, name: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not minimum <= value <= maximum:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not accepted: {name}, {minimum:g} to {maximum:g}")
    return value


def _parse_size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,5})[x×](\d{1,5})", text)
    size = (int(match[1]), int(match[2])) if match else (0, 0)
    if not all(MIN_SIDE_PX <= side <= MAX_SIDE_PX for side in size):
        raise argparse.ArgumentTypeError(
            f"{text!r:.60} is not accepted: WIDTHxHEIGHT in pixels, {MIN_SIDE_PX} to {MAX_SIDE_PX} each"
        )
    return size
