"""Conversations as they were kept before there was a database: a JSON file each. Read once, then set aside. No Qt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from kvscope_app.views.console.conversation import Conversation

MAX_FILE_BYTES: Final = 32 << 20
_SUFFIX: Final = ".json"
_TAKEN: Final = ".imported"
_ASIDE: Final = ".unreadable"


def conversation_files(folder: Path) -> list[Path]:
    """Files that were not read yet."""
    return sorted(path for path in folder.glob(f"*{_SUFFIX}") if path.is_file())


def read_files(paths: list[Path], warnings: list[str]) -> Iterator[tuple[Path, Conversation]]:
    """What is in them. One that cannot be read is kept aside and told of; it never hides the others."""
    for path in paths:
        try:
            yield path, _read(path)
        except OSError as error:
            warnings.append(f"{path.name} was not read: {error.strerror or error}")
        except (ValueError, msgspec.MsgspecError) as error:
            warnings.append(_set_aside(path, error))


def mark_taken(path: Path) -> None:
    """It is in the database now; the file stays, under a name that is not read again."""
    path.replace(path.with_suffix(_SUFFIX + _TAKEN))


def _read(path: Path) -> Conversation:
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"larger than {MAX_FILE_BYTES >> 20} MiB")
    conversation = msgspec.json.decode(path.read_bytes(), type=Conversation)
    if conversation.key != path.stem:
        raise ValueError(f"key {conversation.key!r:.40} is not the file's name")
    return conversation


def _set_aside(path: Path, error: Exception) -> str:
    aside = path.with_suffix(_SUFFIX + _ASIDE)
    try:
        path.replace(aside)
    except OSError:
        return f"A conversation could not be read and was left alone: {path.name} ({error})"
    return f"A conversation could not be read and was kept aside as {aside.name} ({error})"
