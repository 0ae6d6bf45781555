"""Tests of `kvscope export` to pictures and videos."""

from __future__ import annotations

import io
import itertools
import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image
from tests.telemetry.conftest import record_in, simulated_messages

from kvscope_app.main import main
from kvscope_app.media_export import offscreen_view
from kvscope_app.media_export.picture_command import frame_times
from kvscope_telemetry.exports.span import Span
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.writer import RecordingWriter


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(record_in(tmp_path_factory.mktemp("recorded"), 400, "session.mcap").path)


def export(path, out, *words):
    assert main(["export", path, "--out", str(out), "--size", "480x320", *words]) == 0
    return out


def open_image(path):
    return Image.open(io.BytesIO(path.read_bytes()))


def pixels(path):
    return np.asarray(open_image(path).convert("RGB"))


def test_picture_export_works_without_a_display(path, tmp_path):
    words = ["export", path, "--out", str(tmp_path / "map.png"), "--at", "2", "--scale", "2", "--size", "480x320"]
    program = f"import sys\nfrom kvscope_app.main import main\nsys.exit(main({words!r}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, env={})
    assert (done.returncode, done.stderr) == (0, "")
    assert open_image(tmp_path / "map.png").size == (960, 640)


@pytest.mark.parametrize("view", ["heatmap", "timeline", "requests"])
def test_export_draws_a_view_at_the_given_time(qapp, path, tmp_path, view):
    shown = pixels(export(path, tmp_path / "x.png", "--view", view, "--at", "3"))
    assert shown.shape == (320, 480, 3)
    assert len(np.unique(shown.reshape(-1, 3), axis=0)) > 10


def test_export_waits_for_results_of_another_process(qapp, path, tmp_path):
    """The what-if view has a card with numbers for each policy."""
    drawn = export(path, tmp_path / "x.svg", "--view", "what-if", "--at", "3")
    words = "".join(ElementTree.parse(drawn).getroot().itertext())
    assert "per block" in words
    assert "wasted" in words


@pytest.mark.parametrize("view", ["page-map", "throughput", "memory", "events"])
def test_svg_export_of_a_view_contains_its_time(qapp, path, tmp_path, view):
    drawn = export(path, tmp_path / "x.svg", "--view", view, "--at", "3", "--caption", "--theme", "light")
    words = "".join(ElementTree.parse(drawn).getroot().itertext())
    assert "3.0 s" in words


def test_same_time_gives_the_same_picture_and_another_time_a_different_one(qapp, path, tmp_path):
    first, same, other = (
        pixels(export(path, tmp_path / f"{number}.png", "--at", at)) for number, at in enumerate(("1", "1", "3"))
    )
    assert np.array_equal(first, same)
    assert not np.array_equal(first, other)


def test_video_is_reproducible_and_starts_with_the_picture_of_its_start(qapp, path, tmp_path):
    words = ("--from", "1", "--until", "2", "--fps", "5")
    image = open_image(export(path, tmp_path / "x.apng", *words))
    again = export(path, tmp_path / "y.apng", *words)
    assert again.read_bytes() == (tmp_path / "x.apng").read_bytes()
    begin = pixels(export(path, tmp_path / "begin.png", "--at", "1"))
    assert np.array_equal(np.asarray(image.convert("RGB")), begin)
    assert image.n_frames <= 6
    image.seek(image.n_frames - 1)
    assert not np.array_equal(np.asarray(image.convert("RGB")), begin)


@pytest.mark.parametrize("view", ["heatmap", "timeline"])
def test_view_with_a_time_axis_shows_the_given_range(qapp, path, tmp_path, view):
    whole = pixels(export(path, tmp_path / "a.png", "--view", view, "--at", "2"))
    part = pixels(export(path, tmp_path / "b.png", "--view", view, "--at", "2", "--from", "1", "--until", "3"))
    assert not np.array_equal(whole, part)
    image = open_image(export(path, tmp_path / "x.webp", "--view", view, "--from", "1", "--until", "3", "--fps", "2"))
    assert image.n_frames == 4


def test_picture_of_a_growing_recording_shows_what_is_written_so_far(qapp, tmp_path):
    with RecordingWriter(tmp_path / "x.mcap", keyframe_interval_ns=1_000_000_000) as writer:
        for message in simulated_messages(200):
            writer.write(message, wait=True)
        assert writer.flush()
        assert Recording.open(tmp_path / "x.mcap.part").may_grow
        export(str(tmp_path / "x.mcap.part"), tmp_path / "x.png", "--view", "throughput")


def test_picture_without_a_size_grows_until_all_rows_fit(qapp, path, tmp_path):
    assert main(["export", path, "--out", str(tmp_path / "x.svg"), "--view", "events", "--at", "3"]) == 0
    root = ElementTree.parse(tmp_path / "x.svg").getroot()
    assert int(root.get("height")) > 600
    assert "more row" not in "".join(root.itertext())


def test_picture_of_a_given_size_states_how_many_rows_are_left_out(qapp, path, tmp_path):
    root = ElementTree.parse(export(path, tmp_path / "x.svg", "--view", "events", "--caption")).getroot()
    assert (root.get("width"), root.get("height")) == ("480", "320")
    assert re.search(r"[\d,]+ more rows", "".join(root.itertext()))


def test_size_below_the_minimum_of_a_view_is_refused_with_the_minimum(qapp, path, tmp_path, capsys):
    assert main(["export", path, "--out", str(tmp_path / "x.png"), "--view", "requests", "--size", "160x160"]) == 2
    assert re.search(r"160x160 is too small for a picture of Requests: at least \d+x\d+", capsys.readouterr().err)
    assert os.listdir(tmp_path) == []


def test_failed_export_leaves_no_file(qapp, path, tmp_path, capsys):
    assert main(["export", path, "--out", str(tmp_path / "x.apng"), "--from", "1", "--until", "1.01"]) == 2
    assert "less than two frames" in capsys.readouterr().err
    assert main(["export", path, "--out", str(tmp_path / "x.png"), "--at", "900"]) == 2
    assert os.listdir(tmp_path) == []


def test_slow_machine_does_not_change_the_picture(qapp, path, tmp_path, monkeypatch):
    usual = pixels(export(path, tmp_path / "a.png", "--at", "3"))
    looks = itertools.count()
    monkeypatch.setattr(offscreen_view, "time", SimpleNamespace(monotonic=lambda: float(next(looks)), sleep=time.sleep))
    assert np.array_equal(pixels(export(path, tmp_path / "b.png", "--at", "3")), usual)


def test_video_frames_are_evenly_spaced_over_the_span():
    num, shown = frame_times(Span(0, 1_000_000_000, 3_000_000_000), speed=2.0, fps=10.0)
    assert num == 10
    assert list(shown) == pytest.approx([1.0 + 2.0 * number / 9 for number in range(10)])
