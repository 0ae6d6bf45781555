"""`kvscope install-desktop-files`: what it writes holds by its specifications, and goes again without a trace."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest

from kvscope_app.commands import desktop_files
from kvscope_app.main import main
from kvscope_telemetry.recordings.sample import sample_recording

_ASK_QT = (
    "import sys; from PySide6.QtCore import QMimeDatabase; print(QMimeDatabase().mimeTypeForFile(sys.argv[1]).name())"
)
TYPE = "application/x-kvscope-recording"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The data folder of a person."""
    made = tmp_path / "share"
    monkeypatch.setenv("XDG_DATA_HOME", str(made))
    return made


def entry(path):
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",))
    parser.optionxform = str
    parser.read(path, encoding="utf-8")
    return parser["Desktop Entry"]


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_menu_entry_icon_and_type_are_installed_and_removed(folder, capsys):
    assert main(["install-desktop-files"]) == 0
    assert f"installed in {folder}" in capsys.readouterr().out
    assert {
        "applications/kvscope.desktop",
        "applications/kvscope-open.desktop",
        "mime/packages/kvscope-recording.xml",
        "icons/hicolor/scalable/apps/kvscope.svg",
        "icons/hicolor/scalable/mimetypes/application-x-kvscope-recording.svg",
    } <= set(files(folder))
    assert main(["install-desktop-files"]) == 0
    assert main(["install-desktop-files", "--remove"]) == 0
    assert not [name for name in files(folder) if "kvscope" in name]


@pytest.mark.parametrize("path", ["/opt/my tools/kvscope", '/opt/q"uo$te`s\\/100%/kvscope', "/usr/bin/kvscope"])
def test_the_command_of_an_entry_is_the_program_wherever_it_is(folder, monkeypatch, path):
    monkeypatch.setattr(desktop_files, "program", lambda: path)
    assert main(["install-desktop-files"]) == 0
    found = entry(folder / "applications/kvscope-open.desktop")
    line = found["Exec"].replace("\\\\", "\\").replace("%%", "%")
    quoted, rest = re.fullmatch(r'"((?:[^"\\]|\\.)*)" (.*)', line).groups()
    assert (re.sub(r"\\(.)", r"\1", quoted), rest) == (path, "--open %f")
    assert found["MimeType"] == f"{TYPE};"
    assert "%" not in entry(folder / "applications/kvscope.desktop")["Exec"].replace("%%", "")


def test_a_recording_is_told_by_what_is_in_it(folder):
    main(["install-desktop-files"])
    root = xml.etree.ElementTree.parse(folder / "mime/packages/kvscope-recording.xml").getroot()
    space = {"m": "http://www.freedesktop.org/standards/shared-mime-info"}
    assert root.find("m:mime-type", space).get("type") == TYPE
    assert root.find(".//m:glob", space) is None
    data = sample_recording().read_bytes()[:64]
    for match in root.iterfind(".//m:match", space):
        value = match.get("value").encode().decode("unicode_escape").encode("latin-1")
        assert data[int(match.get("offset")) :].startswith(value)


@pytest.mark.skipif(shutil.which("update-mime-database") is None, reason="shared-mime-info is not installed")
def test_qt_knows_a_recording_from_another_mcap_file(folder, tmp_path):
    main(["install-desktop-files"])
    ours, other = tmp_path / "a.mcap", tmp_path / "robot.mcap"
    ours.write_bytes(sample_recording().read_bytes()[:200])
    other.write_bytes(sample_recording().read_bytes()[:200].replace(b"kvscope", b"ros2\0\0\0"))
    types = [
        subprocess.run([sys.executable, "-c", _ASK_QT, str(path)], capture_output=True, text=True, check=True).stdout
        for path in (ours, other)
    ]
    assert [name.strip() == TYPE for name in types] == [True, False]


@pytest.mark.skipif(shutil.which("desktop-file-validate") is None, reason="desktop-file-utils is not installed")
def test_the_entries_hold_by_the_specification(folder):
    main(["install-desktop-files"])
    for path in folder.glob("applications/*.desktop"):
        done = subprocess.run(["desktop-file-validate", str(path)], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.skipif(
    shutil.which("gio") is None or shutil.which("update-mime-database") is None,
    reason="glib's tools or shared-mime-info are not installed",
)
def test_file_managers_of_glib_know_a_recording(folder):
    """`xdg-mime` asks whatever the desktop has; without a desktop it asks `file`, which knows no types of a person."""
    main(["install-desktop-files"])
    words = ["gio", "info", "-a", "standard::content-type", str(sample_recording())]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=os.environ)
    assert f"standard::content-type: {TYPE}" in done.stdout


def test_a_folder_that_cannot_be_written_is_one_line(folder, capsys):
    folder.write_text("a file where the folder should be")
    assert main(["install-desktop-files"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot be written" in line


def test_the_program_is_found_beside_the_interpreter(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pytest"])
    assert Path(desktop_files.program()).name == "kvscope"
