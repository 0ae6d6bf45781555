"""`kvscope install-desktop-files`: adds a menu entry and a file type for recordings to the desktop.

Writes to the user's data folder (XDG) without root; `--remove` deletes the written files.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any, Final

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.operating_system import data_folder
from kvscope_telemetry.whole_file import write_whole

_TARGETS: Final = (
    ("kvscope.desktop", "applications/kvscope.desktop"),
    ("kvscope-open.desktop", "applications/kvscope-open.desktop"),
    ("kvscope-recording.xml", "mime/packages/kvscope-recording.xml"),
    ("icons/kvscope.svg", "icons/hicolor/scalable/apps/kvscope.svg"),
    ("icons/kvscope.svg", "icons/hicolor/scalable/mimetypes/application-x-kvscope-recording.svg"),
)
"""Files to install: (name of the resource file, target path below the user's data folder)."""
_UPDATES: Final = (
    ("update-mime-database", "mime", "shared-mime-info"),
    ("update-desktop-database", "applications", "desktop-file-utils"),
)
"""Programs that update the desktop's databases: (program name, subfolder of the data folder, package to install).

The subfolder is passed to the program as its argument.
"""
_TIMEOUT_S: Final = 60.0
_QUOTED: Final = str.maketrans({character: f"\\{character}" for character in '"`$\\'})


def add_desktop_files_parser(commands: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "install-desktop-files",
        help="add kvscope to the desktop's menu, and open recordings by double-click",
        description="Install a menu entry, an icon and a file type for recordings"
        " (application/x-kvscope-recording, recognised by content) in your data folder:"
        " ~/.local/share, or $XDG_DATA_HOME. Does not need root.",
        allow_abbrev=False,
    )
    parser.add_argument("--remove", action="store_true", help="remove the menu entry, icon and file type")
    parser.set_defaults(run=desktop_files)
    return parser


def desktop_files(args: argparse.Namespace) -> int:
    """Install or remove the files, then update the desktop's databases.

    Raises BadInput if a file cannot be written or removed.
    """
    folder = data_folder()
    try:
        for name, target in _TARGETS:
            if args.remove:
                (folder / target).unlink(missing_ok=True)
            else:
                _write_file(folder / target, _resource_contents(name))
    except OSError as error:
        raise BadInput(f"{str(error.filename or folder)!r} cannot be written: {error.strerror}") from None
    missing_packages = [
        package for program_path, target, package in _UPDATES if not _run_updater(program_path, folder / target)
    ]
    print(f"{'removed from' if args.remove else 'installed in'} {folder}: menu entry, icon, recording file type")
    for package in missing_packages:
        print(f"note: the desktop may not notice before you log in again: {package} is not installed", file=sys.stderr)
    return 0


def program_path() -> str:
    """Return the command that starts this kvscope again: an absolute path if it is found, otherwise "kvscope"."""
    script = Path(sys.argv[0])
    if script.name == "kvscope" and script.is_file():
        return str(script.absolute())
    sibling = Path(sys.executable).with_name("kvscope")
    return str(sibling) if sibling.is_file() else shutil.which("kvscope") or "kvscope"


def _resource_contents(name: str) -> bytes:
    """Return the contents of a resource file.

    In a menu entry, the command `kvscope` is replaced by this program's path, as it may not be on the PATH.
    """
    data = resources.files("kvscope_resources").joinpath(name).read_bytes()
    if not name.endswith(".desktop"):
        return data
    path = program_path()
    quoted_path = f'"{path.translate(_QUOTED)}"'.replace("\\", "\\\\").replace("%", "%%")
    text = data.decode("utf-8").replace("Exec=kvscope", f"Exec={quoted_path}", 1)
    return text.replace("TryExec=kvscope", f"TryExec={path}", 1).encode()


def _write_file(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, data)


def _run_updater(name: str, folder: Path) -> bool:
    """Run program `name`, which updates a database of the desktop, on `folder`. Returns False if it is not
    installed or fails.
    """
    executable = shutil.which(name)
    if executable is None or not folder.is_dir():
        return executable is not None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run([executable, str(folder)], check=True, timeout=_TIMEOUT_S, capture_output=True)
        return True
    return False
