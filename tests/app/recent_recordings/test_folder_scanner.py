"""Tests of the folder scanner: listing, reading headers, and following changes."""

from __future__ import annotations

import os
import threading
import time
from contextlib import closing

import pytest

from kvscope_app.recent_recordings import folder_scanner
from kvscope_app.recent_recordings.folder_scanner import FolderScanner
from kvscope_telemetry.recordings.reader import Recording

WAIT_S = 120


def wait_until(condition):
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s, "the condition did not become true in time"
        time.sleep(0.01)


def read_all(scanner, *names):
    """Wait until exactly these files are listed and read. Returns the recordings by file name."""

    def listed():
        return {recording.path.rpartition("/")[2]: recording for recording in scanner.listing.recordings}

    wait_until(lambda: set(listed()) == set(names) and not scanner.listing.is_reading)
    return listed()


@pytest.fixture
def scanner(tmp_path):
    with closing(FolderScanner(str(tmp_path))) as made:
        yield made


def test_recordings_are_listed_with_model_engine_start_and_length_of_their_headers(write_recording, scanner, tmp_path):
    path = write_recording("one.mcap")
    (tmp_path / "notes.txt").write_text("no recording")
    (tmp_path / "folder.mcap").mkdir()
    one, recorded = read_all(scanner, "one.mcap")["one.mcap"], Recording.open(path)
    assert (one.path, one.num_bytes, one.problem, one.is_part) == (str(path), path.stat().st_size, "", False)
    assert one.header.model.startswith("simulated")
    assert one.header.engine == "kvscope simulated"
    assert (one.header.start_ns, one.header.length_s) == (recorded.start_ns, recorded.info.duration_s)
    assert not one.header.has_texts


def test_files_are_read_on_another_thread(write_recording, scanner, monkeypatch):
    threads, opening = set(), Recording.open

    def noted(path, watch):
        threads.add(threading.current_thread())
        return opening(path, watch)

    monkeypatch.setattr(Recording, "open", noted)
    write_recording("one.mcap")
    assert read_all(scanner, "one.mcap")["one.mcap"].header is not None
    assert threads
    assert threading.main_thread() not in threads


def test_file_that_is_no_recording_is_listed_with_the_reason(write_recording, scanner, tmp_path):
    (tmp_path / "broken.mcap").write_bytes(b"not at all")
    write_recording("one.mcap")
    found = read_all(scanner, "broken.mcap", "one.mcap")
    assert "is not a recording" in found["broken.mcap"].problem
    assert found["one.mcap"].header is not None


def test_failure_in_one_file_leaves_the_others_listed(write_recording, scanner, monkeypatch):
    opening = Recording.open

    def breaks(path, watch):
        if path.endswith("one.mcap"):
            raise ZeroDivisionError("in a codec")
        return opening(path, watch)

    monkeypatch.setattr(Recording, "open", breaks)
    write_recording("one.mcap")
    write_recording("two.mcap")
    found = read_all(scanner, "one.mcap", "two.mcap")
    assert found["one.mcap"].problem == "ZeroDivisionError: in a codec"
    assert found["two.mcap"].header is not None


def test_recordings_list_is_updated_when_a_file_is_added_renamed_or_deleted(write_recording, scanner):
    path = write_recording("one.mcap")
    part = path.rename(path.with_name("one.mcap.part"))
    one = read_all(scanner, "one.mcap.part")["one.mcap.part"]
    assert (one.name, one.is_part) == ("one.mcap", True)
    part.rename(path)
    assert not read_all(scanner, "one.mcap")["one.mcap"].is_part
    path.unlink()
    read_all(scanner)


def test_changed_file_is_read_again(write_recording, scanner, tmp_path):
    whole = write_recording("whole.mcap").read_bytes()
    copy = tmp_path / "copy.mcap"
    copy.write_bytes(whole[:5])
    assert "is not a recording" in read_all(scanner, "copy.mcap", "whole.mcap")["copy.mcap"].problem
    copy.write_bytes(whole)
    wait_until(lambda: read_all(scanner, "copy.mcap", "whole.mcap")["copy.mcap"].header is not None)


def test_growing_file_is_read_once_and_its_size_followed(write_recording, scanner, monkeypatch):
    opened, opening = [], Recording.open

    def noted(path, watch):
        opened.append(path)
        return opening(path, watch)

    whole = write_recording("one.mcap")
    monkeypatch.setattr(Recording, "open", noted)
    part = whole.rename(whole.with_name("two.mcap.part"))
    wait_until(lambda: str(part) in opened)
    with part.open("ab") as file:
        file.write(b"\0" * 10)
    wait_until(lambda: scanner.listing.recordings[0].num_bytes == part.stat().st_size)
    assert read_all(scanner, "two.mcap.part")["two.mcap.part"].header is not None
    assert opened.count(str(part)) == 1


def test_folder_that_is_missing_is_reported_and_found_once_it_is_there(write_recording, tmp_path):
    folder = tmp_path / "later"
    with closing(FolderScanner(str(folder))) as scanner:
        wait_until(lambda: scanner.listing.problem)
        assert scanner.listing.problem == "No such file or directory"
        folder.mkdir()
        wait_until(lambda: not scanner.listing.problem)


def test_only_the_newest_files_of_a_large_folder_are_listed(write_recording, tmp_path, monkeypatch):
    monkeypatch.setattr(folder_scanner, "MAX_LISTED", 2)
    for number in range(4):
        os.utime(write_recording(f"{number}.mcap"), (1_000 + number, 1_000 + number))
    with closing(FolderScanner(str(tmp_path))) as scanner:
        read_all(scanner, "2.mcap", "3.mcap")
        assert scanner.listing.num_left_out == 2


def test_closed_scanner_ends_its_thread(tmp_path):
    before = set(threading.enumerate())
    scanner = FolderScanner(str(tmp_path))
    (thread,) = set(threading.enumerate()) - before
    scanner.close()
    thread.join(WAIT_S)
    assert not thread.is_alive()
