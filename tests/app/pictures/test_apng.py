"""Animated PNGs: every frame is what it was, by another program's reading."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from kvscope_app.pictures.apng import write_apng


def frames(num=6, size=(20, 30), seed=3):
    """Noise, of which a part changes; the third is as the second."""
    random = np.random.default_rng(seed)
    made = [random.integers(0, 256, (*size, 3), np.uint8)]
    for number in range(1, num):
        frame = made[-1].copy()
        if number != 2:
            row, column = random.integers(0, 10, 2)
            frame[row : row + 7, column : column + 9] = random.integers(0, 256, (7, 9, 3), np.uint8)
        made.append(frame)
    return made


def written(made, frame_ms=40):
    file = io.BytesIO()
    write_apng(iter(made), len(made), frame_ms, made[0].shape[1], made[0].shape[0], file)
    return file


def test_frames_are_what_they_were():
    made = frames()
    image = Image.open(written(made))
    shown = [frame for number, frame in enumerate(made) if number != 2]
    assert image.n_frames == len(shown)
    durations = []
    for number, frame in enumerate(shown):
        image.seek(number)
        durations.append(image.info["duration"])
        assert np.array_equal(np.asarray(image.convert("RGB")), frame)
    assert durations == [40, 80, 40, 40, 40]  # what did not change is seen longer


def test_what_changes_little_takes_little():
    still = [np.random.default_rng(1).integers(0, 256, (64, 64, 3), np.uint8)] * 200
    assert len(written(still).getvalue()) < len(written(still[:1]).getvalue()) + 200


def test_a_frame_lasts_no_longer_than_the_format_can_say():
    image = Image.open(written([np.zeros((4, 4, 3), np.uint8)] * 3, frame_ms=40_000))
    assert image.n_frames == 3


def test_the_number_that_was_announced_comes():
    with pytest.raises(AssertionError, match="2 came"):
        write_apng(iter([np.zeros((4, 4, 3), np.uint8)] * 2), 3, 40, 4, 4, io.BytesIO())
