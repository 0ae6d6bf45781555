"""Conversations on disk: a JSON file each, written whole or not at all. No Qt.

A file that cannot be read is kept aside and told of; it never hides the others.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from kvscope_app.views.console.conversation import Conversation
from kvscope_telemetry.errors import KvscopeError

MAX_FILES: Final = 200
"""The newest are loaded."""
MAX_FILE_BYTES: Final = 32 << 20
_SUFFIX: Final = ".json"
_ASIDE: Final = ".unreadable"


@dataclass(frozen=True, slots=True)
class Loaded:
    """Conversations, newest first, and what a person must be told."""

    conversations: list[Conversation]
    warnings: list[str]


class ConversationStore:
    """Files in `folder`, which is made when the first is written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self) -> Loaded:
        """Read the newest `MAX_FILES`."""
        warnings: list[str] = []
        found = (self._read(path, warnings) for path in self._newest())
        conversations = [conversation for conversation in found if conversation is not None]
        conversations.sort(key=lambda conversation: conversation.changed_s, reverse=True)
        return Loaded(conversations, warnings)

    def save(self, conversation: Conversation, *, sync: bool = True) -> None:
        """Write one. Raises KvscopeError when the disk does not take it; what was there stays.

        `sync`: wait until the disk has it, so that it also outlives the machine's end, not only the desktop's.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _write_atomically(self._path(conversation.key), msgspec.json.encode(conversation), sync)
        except OSError as error:
            raise KvscopeError(f"the conversation was not saved: {error.strerror or error}") from error

    def delete(self, key: str) -> None:
        """Remove one; none there is none to remove."""
        self._path(key).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{_SUFFIX}"

    def _newest(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        dated = [(path.stat().st_mtime_ns, path) for path in self.folder.glob(f"*{_SUFFIX}") if path.is_file()]
        return [path for _, path in sorted(dated, reverse=True)[:MAX_FILES]]

    def _read(self, path: Path, warnings: list[str]) -> Conversation | None:
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise ValueError(f"larger than {MAX_FILE_BYTES >> 20} MiB")
            conversation = msgspec.json.decode(path.read_bytes(), type=Conversation)
            if conversation.key != path.stem:
                raise ValueError(f"key {conversation.key!r:.40} is not the file's name")
        except OSError as error:
            warnings.append(f"{path.name} was not read: {error.strerror or error}")
            return None
        except (ValueError, msgspec.MsgspecError) as error:
            warnings.append(_set_aside(path, error))
            return None
        _end_unfinished(conversation)
        return conversation


def _set_aside(path: Path, error: Exception) -> str:
    aside = path.with_suffix(_SUFFIX + _ASIDE)
    try:
        path.replace(aside)
    except OSError:
        return f"A conversation could not be read and was left alone: {path.name} ({error})"
    return f"A conversation could not be read and was kept aside as {aside.name} ({error})"


def _end_unfinished(conversation: Conversation) -> None:
    """An answer that was being written when the desktop ended will not go on."""
    for message in conversation.messages:
        if message.role == "assistant" and not message.ending:
            message.ending, message.note = "interrupted", "kvscope was closed"


def _write_atomically(path: Path, data: bytes, sync: bool) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(name, path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
