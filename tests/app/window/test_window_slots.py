"""Windows of several desktops remember their places apart; a desktop that was killed holds none."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

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


def test_each_kind_counts_from_one_and_takes_the_first_free(slots):
    assert [slots.acquire("window"), slots.acquire("window"), slots.acquire("playback")] == [1, 2, 1]
    slots.release("window", 1)
    assert slots.acquire("window") == 1


def test_another_desktop_takes_the_next_until_it_is_killed(slots, tmp_path):
    command = [sys.executable, "-c", OTHER, str(tmp_path / "kvscope.ini")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "1\n"
        assert slots.acquire("window") == 2
        other.send_signal(signal.SIGKILL)
        other.wait(120)
    assert slots.acquire("window") == 1
    assert slots.start_opening("window", 1), "the killed process had not finished opening its window"


def test_without_a_folder_the_windows_of_this_desktop_are_told_apart(tmp_path):
    (tmp_path / "file").write_text("")
    slots = WindowSlots(tmp_path / "file" / "kvscope.ini")
    assert [slots.acquire("window"), slots.acquire("window")] == [1, 2]
    slots.close()


def test_finished_and_closed_windows_are_no_failed_starts(slots, tmp_path):
    slots.acquire("window")
    assert not slots.start_opening("window", 1)
    slots.finish_opening("window", 1)
    slots.release("window", 1)
    assert not slots.start_opening("window", slots.acquire("window"))
    slots.close()  # before it was open, in good order
    again = WindowSlots(tmp_path / "kvscope.ini")
    assert not again.start_opening("window", again.acquire("window"))
    again.close()
