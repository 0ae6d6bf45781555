"""Encodes the frames of a video: ffmpeg writes `.mp4`, Pillow writes `.webp`, `.gif` and `.apng`.

ffmpeg and WebP receive one frame at a time. For GIF and APNG, Pillow keeps all frames in memory, so their number is
limited. Imports no Qt.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.errors import BadInput, KvscopeError

if TYPE_CHECKING:
    from PIL.Image import Image

Frame = npt.NDArray[np.uint8]
"""RGB pixels of a frame, shape (height, width, 3)."""
_MAX_WEBP_FRAMES: Final = 10_000
_MAX_PIXELS: Final = {".gif": 256 << 20, ".apng": 128 << 20}
"""Maximum pixels of all frames together. Pillow needs one byte per pixel of a GIF, and eight per pixel of an APNG."""
_NO_PILLOW: Final = "Pillow is not installed: pip install pillow"
_FFMPEG: Final = "ffmpeg"


@dataclass(frozen=True, slots=True)
class VideoFrames:
    """Frames of a video, shape (height, width, 3) each, with their number and rate."""

    frames: Iterator[Frame]
    num_frames: int
    fps: float
    width: int
    height: int

    @property
    def frame_ms(self) -> int:
        return max(round(1000 / self.fps), 1)


def require_encoder(suffix: str, num_frames: int, width: int, height: int) -> None:
    """Check, before anything is drawn, that a video can be encoded.

    Raises:
        BadInput: A program or library is missing, or the video has too many frames.
    """
    if suffix == ".mp4" and shutil.which(_FFMPEG) is None:
        raise BadInput("writing .mp4 needs ffmpeg, which is not on PATH: install it, or write .webp, .gif or .apng")
    if not is_encoder_installed(suffix):
        raise BadInput(f"{suffix}: {_NO_PILLOW}")
    if suffix == ".webp" and num_frames > _MAX_WEBP_FRAMES:
        raise BadInput(_too_many(num_frames, _MAX_WEBP_FRAMES, suffix))
    if suffix in _MAX_PIXELS and num_frames * width * height > _MAX_PIXELS[suffix]:
        raise BadInput(_too_many(num_frames, _MAX_PIXELS[suffix] // (width * height), suffix))


def encode(video: VideoFrames, suffix: str, file: BinaryIO) -> None:
    """Write a video to `file`, which must be open and empty. `suffix` such as ".gif" chooses the format."""
    _ENCODERS[suffix](video, file)


def _too_many(num_frames: int, max_frames: int, suffix: str) -> str:
    return (
        f"{num_frames:,} frames are too many for a {suffix} file of this size, which holds {max_frames:,}: use a "
        "higher --speed, fewer --fps, a shorter range, or .mp4 or .webp"
    )


def _write_apng(video: VideoFrames, file: BinaryIO) -> None:
    from PIL import Image

    first, *others = map(Image.fromarray, video.frames)
    first.save(file, "PNG", save_all=True, append_images=others, duration=video.frame_ms, loop=0)


def _write_webp(video: VideoFrames, file: BinaryIO) -> None:
    image = _lazy_image(video)
    image.save(file, "WEBP", save_all=True, duration=video.frame_ms, loop=0, lossless=True, quality=60, method=4)


def _write_gif(video: VideoFrames, file: BinaryIO) -> None:
    from PIL import Image

    first, *others = [
        Image.fromarray(frame).quantize(255, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
        for frame in video.frames
    ]
    first.save(file, "GIF", save_all=True, append_images=others, duration=video.frame_ms, loop=0)


def _lazy_image(video: VideoFrames) -> Image:
    """Return an animated image that creates each frame when Pillow seeks to it.

    A list of images would keep all frames in memory.
    """
    from PIL import Image

    class LazyImage(Image.Image):
        n_frames = video.num_frames
        is_animated = video.num_frames > 1

        def __init__(self) -> None:
            super().__init__()
            self._index = -1
            self.seek(0)

        def seek(self, frame: int) -> None:
            while self._index < frame:
                self.shown = Image.fromarray(next(video.frames))
                self._index += 1
            self._mode, self._size, self.im = self.shown.mode, self.shown.size, self.shown.im

        def tell(self) -> int:
            return self._index

    return LazyImage()


def _write_mp4(video: VideoFrames, file: BinaryIO) -> None:
    command = [_FFMPEG, "-v", "error", "-nostdin", "-y", "-f", "rawvideo", "-pix_fmt", "rgb24"]
    command += ["-s", f"{video.width}x{video.height}", "-r", f"{video.fps:g}", "-i", "pipe:0"]
    # Video players require even dimensions and this pixel format.
    command += ["-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2", "-pix_fmt", "yuv420p", "-movflags", "+faststart"]
    _pipe_frames([*command, "-f", "mp4", file.name], video.frames)


def _pipe_frames(command: list[str], frames: Iterator[Frame]) -> None:
    """Write all `frames` to the standard input of `command`.

    Raises KvscopeError with the last line of the process's error output if it fails.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=subprocess.DEVNULL, stderr=pipe) as process:
        assert process.stdin is not None, "stdin is a pipe"
        try:
            for frame in frames:
                process.stdin.write(frame.tobytes())
        except BrokenPipeError:
            pass  # the reason is in the process's stderr, read below
        except BaseException:
            process.kill()
            raise
        _, stderr = process.communicate()
    if process.returncode:
        lines = stderr.decode(errors="replace").strip().splitlines()
        raise KvscopeError(f"ffmpeg failed: {lines[-1] if lines else f'exit code {process.returncode}'}")


_ENCODERS: Final[dict[str, Callable[[VideoFrames, BinaryIO], Any]]] = {
    ".apng": _write_apng,
    ".webp": _write_webp,
    ".gif": _write_gif,
    ".mp4": _write_mp4,
}


def is_encoder_installed(suffix: str) -> bool:
    return shutil.which(_FFMPEG) is not None if suffix == ".mp4" else find_spec("PIL") is not None
