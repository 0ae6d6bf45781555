"""Tests of the image and video encoders: frames written, frame limits, and errors about missing encoders."""

from __future__ import annotations

import io
import stat

import numpy as np
import pytest
from PIL import Image

from kvscope_app.media_export import encoders
from kvscope_app.media_export.encoders import VideoFrames, encode, require_encoder
from kvscope_telemetry.errors import BadInput, KvscopeError

COLORS = ((200, 30, 30), (30, 200, 30), (30, 30, 200), (220, 220, 40))


def make_frames(fps=20.0, size=(32, 48)):
    frames = (np.full((*size, 3), color, np.uint8) for color in COLORS)
    return VideoFrames(frames, len(COLORS), fps, size[1], size[0])


@pytest.mark.parametrize("suffix", [".webp", ".gif", ".apng"])
def test_encoded_file_contains_every_frame(tmp_path, suffix):
    path = tmp_path / f"x{suffix}"
    with path.open("wb") as file:
        encode(make_frames(), suffix, file)
    image = Image.open(io.BytesIO(path.read_bytes()))
    assert (image.n_frames, image.size) == (4, (48, 32))
    for number, color in enumerate(COLORS):
        image.seek(number)
        assert np.allclose(np.asarray(image.convert("RGB"))[16, 24], color, atol=2)


@pytest.mark.parametrize("suffix", [".gif", ".apng"])
def test_repeated_frame_is_encoded_as_a_longer_duration(tmp_path, suffix):
    path = tmp_path / f"x{suffix}"
    colors = (COLORS[0], COLORS[1], COLORS[1], COLORS[2])
    still = VideoFrames((np.full((32, 48, 3), color, np.uint8) for color in colors), 4, 25.0, 48, 32)
    with path.open("wb") as file:
        encode(still, suffix, file)
    image = Image.open(io.BytesIO(path.read_bytes()))
    durations = []
    for number in range(image.n_frames):
        image.seek(number)
        durations.append(image.info["duration"])
    assert durations == [40, 80, 40]
    assert image.info["loop"] == 0  # endless loop


def test_apng_is_lossless(tmp_path):
    made = np.random.default_rng(3).integers(0, 256, (5, 20, 30, 3), np.uint8)
    with (tmp_path / "x.apng").open("wb") as file:
        encode(VideoFrames(iter(made), 5, 10.0, 30, 20), ".apng", file)
    image = Image.open(io.BytesIO((tmp_path / "x.apng").read_bytes()))
    for number, frame in enumerate(made):
        image.seek(number)
        assert np.array_equal(np.asarray(image.convert("RGB")), frame)


def test_webp_encoder_holds_one_frame_at_a_time(tmp_path):
    alive, peak = 0, 0

    def frames():
        nonlocal alive, peak
        for color in COLORS * 5:
            alive += 1
            peak = max(peak, alive)
            yield np.full((32, 48, 3), color, np.uint8)
            alive -= 1

    with (tmp_path / "x.webp").open("wb") as file:
        encode(VideoFrames(frames(), len(COLORS) * 5, 10.0, 48, 32), ".webp", file)
    assert peak == 1


def fake_ffmpeg(tmp_path, monkeypatch, body):
    program = tmp_path / "bin" / "ffmpeg"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")


def test_ffmpeg_receives_all_pixels_and_the_frame_rate(tmp_path, monkeypatch):
    fake_ffmpeg(tmp_path, monkeypatch, f'echo "$@" > {tmp_path}/words; for last; do :; done; cat > "$last"')
    with (tmp_path / "x.mp4.part").open("wb") as file:
        encode(make_frames(fps=12.5), ".mp4", file)
    assert (tmp_path / "x.mp4.part").read_bytes() == b"".join(bytes(color) * 32 * 48 for color in COLORS)
    assert "-s 48x32 -r 12.5" in (tmp_path / "words").read_text()


def test_ffmpeg_failure_raises_an_error_with_its_output(tmp_path, monkeypatch):
    fake_ffmpeg(tmp_path, monkeypatch, "cat > /dev/null; echo no room >&2; exit 3")
    with (tmp_path / "x").open("wb") as file, pytest.raises(KvscopeError, match="ffmpeg failed: no room"):
        encode(make_frames(), ".mp4", file)


def test_ffmpeg_ends_when_the_frames_are_interrupted(tmp_path, monkeypatch):
    fake_ffmpeg(tmp_path, monkeypatch, "cat > /dev/null")

    def broken():
        yield np.zeros((32, 48, 3), np.uint8)
        raise KeyboardInterrupt

    with (tmp_path / "x").open("wb") as file, pytest.raises(KeyboardInterrupt):
        encode(VideoFrames(broken(), 9, 10.0, 48, 32), ".mp4", file)


def test_missing_encoder_is_named_in_the_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadInput, match="ffmpeg, which is not on PATH"):
        require_encoder(".mp4", 10, 100, 100)
    monkeypatch.setattr(encoders, "find_spec", lambda name: None)
    for suffix in (".webp", ".gif", ".apng"):
        with pytest.raises(BadInput, match=rf"^{suffix}: Pillow is not installed: pip install pillow$"):
            require_encoder(suffix, 10, 100, 100)


def test_too_many_frames_are_refused_with_the_maximum():
    with pytest.raises(BadInput, match=r"2,000 frames are too many for a \.gif file of this size, which holds 268"):
        require_encoder(".gif", 2000, 1000, 1000)
    with pytest.raises(BadInput, match=r"500 frames are too many for a \.apng file of this size, which holds 134"):
        require_encoder(".apng", 500, 1000, 1000)
    with pytest.raises(BadInput, match="holds 10,000"):
        require_encoder(".webp", 20_000, 100, 100)
