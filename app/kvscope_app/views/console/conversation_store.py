"""Store of conversations in an SQLite file, shared by all windows of the user's kvscope processes. Imports no Qt.

Each conversation has a revision, and a window may write only if it has seen the newest one, so that windows do not
overwrite each other's changes. An unfinished answer is stored with its writer's process identity, so that other windows
can detect whether that process has ended.

A rescue file is a JSON file with one conversation that could not be written to the database when kvscope was closed. It
is imported once, at the next start.
"""

from __future__ import annotations

import secrets
import sqlite3
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from kvscope_app.engine_launcher.process_identity import is_alive, own_identity
from kvscope_app.sqlite_files import SqliteSchema, open_sqlite
from kvscope_app.views.console.conversation import Conversation, Draft
from kvscope_telemetry import operating_system
from kvscope_telemetry.errors import KvscopeError

FILE_NAME: Final = "conversations.sqlite3"
_SCHEMA: Final = SqliteSchema(
    version=2,
    tables="""
CREATE TABLE IF NOT EXISTS conversations (
    key TEXT PRIMARY KEY, revision INTEGER NOT NULL, changed_s REAL NOT NULL, writer TEXT NOT NULL, data BLOB NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS unreadable (key TEXT, data BLOB, reason TEXT);
CREATE TABLE IF NOT EXISTS drafts (key TEXT PRIMARY KEY, data BLOB NOT NULL) WITHOUT ROWID;
""",
    probe="SELECT key, revision, changed_s, writer, data FROM conversations LIMIT 0",
    contents="conversations",
)
MAX_FILE_BYTES: Final = 32 << 20
_SUFFIX: Final = ".json"
_IMPORTED_SUFFIX: Final = ".imported"
_UNREADABLE_SUFFIX: Final = ".unreadable"
MAX_LOADED: Final = 200
"""Maximum number of conversations loaded, newest first. Older conversations stay in the file."""
_UPSERT: Final = (
    "INSERT INTO conversations VALUES (?1, ?2, ?3, ?4, ?5) ON CONFLICT (key) DO UPDATE"
    " SET revision = ?2, changed_s = ?3, writer = ?4, data = ?5"
)


class ChangedElsewhere(KvscopeError):
    """Raised if another window has changed a conversation since this window read it. `theirs` is the other window's
    version.
    """

    def __init__(self, theirs: Conversation) -> None:
        super().__init__("the conversation was changed in another window")
        self.theirs = theirs


@dataclass(frozen=True, slots=True)
class LoadedConversations:
    """Stored conversations, newest first, and warnings for the user."""

    conversations: list[Conversation]
    warnings: list[str]
    drafts: dict[str, Draft] = field(default_factory=dict)
    """Unsent text by conversation key. `conversations` includes conversations that have only a draft."""


@dataclass(frozen=True, slots=True)
class StoredChanges:
    """Changes by other windows since the last poll: conversations written, and keys of conversations deleted."""

    written: list[Conversation] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)


class ConversationStore:
    """Database in `folder`. It is opened when it is first used, and reopened after a failure."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.written_elsewhere: set[str] = set()
        """Keys of conversations in which another window of a running process is writing an answer."""
        self._writer = f"{own_identity()}-{secrets.token_hex(4)}"  # unique per store; see `_is_writer_alive`
        self._connection: sqlite3.Connection | None = None
        self._revisions: dict[str, int] = {}
        self._read_version = -1
        """SQLite's `data_version` at the last read, -1 before the first. It changes when another connection writes."""

    def load(self) -> LoadedConversations:
        """Import rescue files, then read the newest `MAX_LOADED` conversations. Errors become warnings."""
        warnings: list[str] = []
        conversations: list[Conversation] = []
        drafts: dict[str, Draft] = {}
        if not self.folder.is_dir():
            return LoadedConversations(conversations, warnings)
        try:
            database = self._open(warnings)
            self._import_files(database, warnings)
            conversations = self._read_newest(database, warnings)
            drafts = self._read_drafts(database)
        except (OSError, sqlite3.Error) as error:
            warnings.append(f"The conversations were not read: {_reason(error)}")
            self.close()
        # A conversation is saved with its first prompt; before that, only its draft is stored.
        unsent = [Conversation(key=key, changed_s=time.time()) for key in drafts if key not in self._revisions]
        return LoadedConversations([*unsent, *conversations], warnings, drafts)

    def save(self, conversation: Conversation, *, sync: bool = True, is_writing: bool = False) -> None:
        """Write one conversation. On an error, the stored version remains.

        Args:
            sync: Whether to wait until the data is on disk, so that it survives a crash of the machine and not only of
                kvscope.
            is_writing: Whether an answer is being written, so that more changes will follow.

        Raises:
            ChangedElsewhere: Another window has written the conversation since it was read here.
            KvscopeError: Writing failed.
        """
        try:
            database = self._open([])
            database.execute(f"PRAGMA synchronous={'FULL' if sync else 'NORMAL'}")
            database.execute("BEGIN IMMEDIATE")
            try:
                revision = self._write(database, conversation, self._writer if is_writing else "")
                database.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    database.execute("ROLLBACK")
                raise
            self._revisions[conversation.key] = revision
        except (OSError, sqlite3.Error) as error:
            self.close()
            raise KvscopeError(f"the conversation was not saved: {_reason(error)}") from error

    def save_draft(self, key: str, draft: Draft) -> None:
        """Write the unsent text of a conversation, or delete it if it is empty. The last writer wins.

        Raises KvscopeError if writing fails.
        """
        try:
            database = self._open([])
            database.execute("PRAGMA synchronous=NORMAL")
            if draft == Draft():
                database.execute("DELETE FROM drafts WHERE key = ?", (key,))
            else:
                database.execute("INSERT OR REPLACE INTO drafts VALUES (?, ?)", (key, msgspec.json.encode(draft)))
        except (OSError, sqlite3.Error) as error:
            self.close()
            raise KvscopeError(f"the draft was not saved: {_reason(error)}") from error

    def mark_seen(self, key: str) -> None:
        """Mark the stored version as seen after a merge, so that the next `save` may replace it.

        Raises KvscopeError if reading fails.
        """
        try:
            row = self._open([]).execute("SELECT revision FROM conversations WHERE key = ?", (key,)).fetchone()
        except (OSError, sqlite3.Error) as error:
            raise KvscopeError(f"the conversation was not read: {_reason(error)}") from error
        self._revisions[key] = row[0] if row else 0

    def delete(self, key: str) -> None:
        """Delete a conversation and its draft, if they exist. Raises KvscopeError if writing fails."""
        self._revisions.pop(key, None)
        try:
            database = self._open([])
            database.execute("DELETE FROM conversations WHERE key = ?", (key,))
            database.execute("DELETE FROM drafts WHERE key = ?", (key,))
        except (OSError, sqlite3.Error) as error:
            self.close()
            raise KvscopeError(f"the conversation was not deleted: {_reason(error)}") from error

    def read_one(self, key: str) -> Conversation | None:
        """Return a stored conversation, or None if there is none with this key or it cannot be read."""
        try:
            database = self._open([])
            query = "SELECT key, revision, writer, data FROM conversations WHERE key = ?"
            return next(iter(self._decode(database, database.execute(query, (key,)).fetchall(), [])), None)
        except (OSError, sqlite3.Error):
            self.close()
            return None

    def add_all(self, conversations: Sequence[Conversation]) -> None:
        """Write new conversations in one transaction. Raises KvscopeError, and writes none, if that fails."""
        with self._transaction("imported") as database:
            for each in conversations:
                row = (each.key, 1, each.changed_s, "", msgspec.json.encode(each))
                database.execute("INSERT INTO conversations VALUES (?, ?, ?, ?, ?)", row)
        self._revisions.update({each.key: 1 for each in conversations})

    def delete_all(self, keys: Collection[str]) -> None:
        """Delete conversations in one transaction. Raises KvscopeError, and deletes none, if that fails."""
        with self._transaction("deleted") as database:
            database.executemany("DELETE FROM conversations WHERE key = ?", [(key,) for key in keys])
        for key in keys:
            self._revisions.pop(key, None)

    @contextmanager
    def _transaction(self, participle: str) -> Iterator[sqlite3.Connection]:
        """Run one transaction. Raises KvscopeError that says the conversations were not `participle`."""
        try:
            database = self._open([])
            database.execute("PRAGMA synchronous=FULL")
            database.execute("BEGIN IMMEDIATE")
            try:
                yield database
                database.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    database.execute("ROLLBACK")
                raise
        except (OSError, sqlite3.Error) as error:
            self.close()
            raise KvscopeError(f"the conversations were not {participle}: {_reason(error)}") from error

    def read_changes(self, exclude: Collection[str] = ()) -> StoredChanges:
        """Return the conversations that other windows wrote or deleted since the last call. Fast if there are none.

        Conversations in `exclude`, which have unsaved changes here, are skipped; `save` detects their conflicts.
        """
        try:
            if self._connection is None and not (self.folder / FILE_NAME).exists():
                return StoredChanges()
            database = self._open([])
            data_version = database.execute("PRAGMA data_version").fetchone()[0]
            orphans = self._orphans(database)
            if data_version == self._read_version and not orphans:
                return StoredChanges()
            self._read_version = data_version
            return self._changes(database, orphans, exclude)
        except (OSError, sqlite3.Error):  # the next save reports the error if it persists
            self.close()
            return StoredChanges()

    def close(self) -> None:
        """Close the file. Any further call opens it again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
            self._read_version = -1  # another connection counts separately

    def _open(self, warnings: list[str]) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = open_sqlite(self.folder / FILE_NAME, _SCHEMA, warnings)
        return self._connection

    def _write(self, database: sqlite3.Connection, conversation: Conversation, writer: str) -> int:
        key = conversation.key
        row = database.execute("SELECT revision, data FROM conversations WHERE key = ?", (key,)).fetchone()
        seen_revision = self._revisions.get(key, 0)
        if row is not None and row[0] != seen_revision:
            raise ChangedElsewhere(msgspec.json.decode(row[1], type=Conversation))
        revision = max(seen_revision, row[0] if row else 0) + 1
        data = msgspec.json.encode(conversation)
        database.execute(_UPSERT, (key, revision, conversation.changed_s, writer, data))
        return revision

    def _import_files(self, database: sqlite3.Connection, warnings: list[str]) -> None:
        """Import rescue files in one transaction. A file is renamed only after its conversation is committed."""
        rescued = list(read_files(conversation_files(self.folder), warnings))
        if not rescued:
            return
        database.execute("BEGIN IMMEDIATE")
        try:
            for _, conversation in rescued:
                data = msgspec.json.encode(conversation)
                query = "SELECT changed_s FROM conversations WHERE key = ?"
                row = database.execute(query, (conversation.key,)).fetchone()
                if row is None or row[0] < conversation.changed_s:
                    database.execute(_UPSERT, (conversation.key, 1, conversation.changed_s, "", data))
            database.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                database.execute("ROLLBACK")
            raise
        for path, _ in rescued:
            with suppress(OSError):  # it is read again, but contains nothing new
                mark_imported(path)

    def _read_newest(self, database: sqlite3.Connection, warnings: list[str]) -> list[Conversation]:
        self._read_version = database.execute("PRAGMA data_version").fetchone()[0]
        self._revisions = dict(database.execute("SELECT key, revision FROM conversations").fetchall())
        rows = database.execute(
            "SELECT key, revision, writer, data FROM conversations ORDER BY changed_s DESC LIMIT ?", (MAX_LOADED,)
        ).fetchall()
        return self._decode(database, rows, warnings)

    def _read_drafts(self, database: sqlite3.Connection) -> dict[str, Draft]:
        drafts = {}
        for key, data in database.execute("SELECT key, data FROM drafts").fetchall():
            with suppress(ValueError, msgspec.MsgspecError):  # the next draft of the conversation replaces it
                drafts[key] = msgspec.json.decode(data, type=Draft)
        return drafts

    def _decode(
        self, database: sqlite3.Connection, rows: Iterable[tuple[str, int, str, bytes]], warnings: list[str]
    ) -> list[Conversation]:
        conversations = []
        for key, revision, writer, data in rows:
            try:
                conversation = msgspec.json.decode(data, type=Conversation)
                if conversation.key != key:
                    raise ValueError("it is stored under the key of another conversation")
            except (ValueError, msgspec.MsgspecError) as error:
                self._move_to_unreadable(database, key, str(error))
                warnings.append(f"A conversation could not be read and was set aside in the database ({error})")
                continue
            self._revisions[key] = revision
            self._record_writer(conversation, writer)
            conversations.append(conversation)
        return conversations

    def _record_writer(self, conversation: Conversation, writer: str) -> None:
        """Update `written_elsewhere`. Mark the conversation's unfinished answers as interrupted if their writer has
        ended.
        """
        self.written_elsewhere.discard(conversation.key)
        if writer and writer != self._writer and _is_writer_alive(writer):
            self.written_elsewhere.add(conversation.key)
            return
        if writer == self._writer:
            return
        for message in conversation.messages:
            if message.role == "assistant" and not message.ending:
                message.ending, message.note = "interrupted", "kvscope was closed"

    def _move_to_unreadable(self, database: sqlite3.Connection, key: str, reason: str) -> None:
        database.execute("INSERT INTO unreadable SELECT key, data, ? FROM conversations WHERE key = ?", (reason, key))
        database.execute("DELETE FROM conversations WHERE key = ?", (key,))

    def _orphans(self, database: sqlite3.Connection) -> list[str]:
        if not self.written_elsewhere:
            return []
        rows = database.execute("SELECT key, writer FROM conversations WHERE writer <> ''").fetchall()
        return [key for key, writer in rows if key in self.written_elsewhere and not _is_writer_alive(writer)]

    def _changes(self, database: sqlite3.Connection, orphans: Iterable[str], exclude: Collection[str]) -> StoredChanges:
        present = dict(database.execute("SELECT key, revision FROM conversations").fetchall())
        changed = {key for key, revision in present.items() if self._revisions.get(key) != revision} | set(orphans)
        deleted = [key for key in self._revisions if key not in present and key not in exclude]
        for key in deleted:
            del self._revisions[key]
            self.written_elsewhere.discard(key)
        query = "SELECT key, revision, writer, data FROM conversations WHERE key = ?"
        rows = [row for key in changed.difference(exclude) for row in database.execute(query, (key,)).fetchall()]
        return StoredChanges(self._decode(database, rows, []), deleted)


def _is_writer_alive(writer: str) -> bool:
    """Whether the process of a window is running. `writer` has the format `PID-START-RANDOM`: the process identity
    (`process_identity`), and random digits that distinguish several windows of one process.
    """
    return is_alive(writer.rpartition("-")[0])


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


# Rescue files
def conversation_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob(f"*{_SUFFIX}") if path.is_file())


def read_files(paths: list[Path], warnings: list[str]) -> Iterator[tuple[Path, Conversation]]:
    """Yield the conversations in `paths`. An unreadable file is renamed, reported in `warnings` and skipped."""
    for path in paths:
        try:
            yield path, _read(path)
        except OSError as error:
            warnings.append(f"{path.name} was not read: {error.strerror or error}")
        except (ValueError, msgspec.MsgspecError) as error:
            warnings.append(_rename_unreadable(path, error))


def mark_imported(path: Path) -> None:
    operating_system.rename(path, path.with_suffix(_SUFFIX + _IMPORTED_SUFFIX))


def _read(path: Path) -> Conversation:
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"larger than {MAX_FILE_BYTES >> 20} MiB")
    conversation = msgspec.json.decode(path.read_bytes(), type=Conversation)
    if conversation.key != path.stem:
        raise ValueError(f"key {conversation.key!r:.40} is not the file's name")
    return conversation


def _rename_unreadable(path: Path, error: Exception) -> str:
    """Rename a rescue file so that it is not read again. Returns a warning for the user."""
    new_path = path.with_suffix(_SUFFIX + _UNREADABLE_SUFFIX)
    try:
        path.replace(new_path)
    except OSError:
        return f"A conversation could not be read and was not changed: {path.name} ({error})"
    return f"A conversation could not be read and was set aside as {new_path.name} ({error})"
