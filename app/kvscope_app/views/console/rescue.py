"""Words that could not be saved when a window closed: written as files, where there is room for them. No Qt.

In the conversations' own folder they are named as the store takes them in at the next start.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from kvscope_app.views.console.conversation import Conversation


def rescue(folder: Path, conversations: Iterable[Conversation]) -> tuple[list[Path], bool]:
    """The files written, and whether all that was given is in them. Raises nothing."""
    given = list(conversations)
    paths = [path for path in (_write(folder, conversation) for conversation in given) if path is not None]
    return paths, len(paths) == len(given)


def rescue_text(paths: list[Path], is_all: bool, folder: Path) -> str:
    """One line that says where they are."""
    where = ", ".join(str(path) for path in paths)
    if not is_all:
        return f"Conversations could not be saved, and there was no room for a copy{f' but {where}' if where else ''}."
    if all(path.parent == folder for path in paths):
        return f"Conversations could not be saved; they are in {where}, and the next start takes them in."
    return f"Conversations could not be saved; they are in {where}. Moved to {folder}, the next start takes them in."


def _write(folder: Path, conversation: Conversation) -> Path | None:
    data = msgspec.json.format(msgspec.json.encode(conversation), indent=1)
    for place in _places(folder):
        path = place / f"{conversation.key}.json"
        try:
            _write_whole(path, data)
        except OSError:
            continue
        return path
    return None


def _places(folder: Path) -> Iterator[Path]:
    yield folder
    yield Path.home()
    yield Path(tempfile.gettempdir())


def _write_whole(path: Path, data: bytes) -> None:
    """All of it or nothing, readable by nobody else."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        os.unlink(part)
        raise
