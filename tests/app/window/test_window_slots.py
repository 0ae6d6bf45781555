"""Tests of the slots under which windows of several desktops save their geometry."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from tests.processes import needs_unix

from kvscope_app.window.window_slots import WindowSlots

OTHER = (
    "import sys, pathlib; from kvscope_app.window.window_slots import WindowSlots;"
    " slots = WindowSlots(pathlib.Path(sys.argv[1])); slot = slots.acquire('window');"
    " slots.start_opening('window', slot); print(slot, flush=True); sys.stdin.read()"
)


@pytest.fixture
def slots(tmp_path):
    made = WindowSlots(tmp_path / "kvscope.ini")
    yield made
    made.close()


def test_new_window_takes_the_first_free_geometry_slot_of_its_kind(slots):
    assert [slots.acquire("window"), slots.acquire("window"), slots.acquire("playback")] == [1, 2, 1]
    slots.release("window", 1)
    assert slots.acquire("window") == 1


@needs_unix
def test_slot_of_another_desktop_is_free_once_it_is_killed(slots, tmp_path):
    command = [sys.executable, "-c", OTHER, str(tmp_path / "kvscope.ini")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "1\n"
        assert slots.acquire("window") == 2
        other.send_signal(signal.SIGKILL)
        other.wait(120)
    assert slots.acquire("window") == 1
    assert slots.start_opening("window", 1), "the killed process had not finished opening its window"


def test_window_geometry_slots_are_numbered_even_if_the_settings_folder_is_unusable(tmp_path):
    (tmp_path / "file").write_text("")
    slots = WindowSlots(tmp_path / "file" / "kvscope.ini")
    assert [slots.acquire("window"), slots.acquire("window")] == [1, 2]
    slots.close()


def test_opened_and_closed_windows_do_not_count_as_failed_starts(slots, tmp_path):
    slots.acquire("window")
    assert not slots.start_opening("window", 1)
    slots.finish_opening("window", 1)
    slots.release("window", 1)
    assert not slots.start_opening("window", slots.acquire("window"))
    slots.close()  # closed normally before the window was open
    again = WindowSlots(tmp_path / "kvscope.ini")
    assert not again.start_opening("window", again.acquire("window"))
    again.close()
