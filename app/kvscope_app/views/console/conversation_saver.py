"""Saves conversations, retries failed saves, and loads what other windows saved. Imports no widgets."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec
from PySide6.QtCore import QObject, QTimer, Signal

from kvscope_app.views.console.conversation import Conversation, Draft, merge_messages
from kvscope_app.views.console.conversation_store import ChangedElsewhere, ConversationStore
from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.whole_file import write_whole

SAVE_DELAY_MS: Final = 800
UNFINISHED_SAVE_INTERVAL_S: Final = 2.0
"""Interval in seconds at which an unfinished answer is saved, which limits the text lost if kvscope is killed."""
RETRY_MS: Final = 5000
RELOAD_MS: Final = 1000
_SAVES_RECOVERED: Final = "Conversations are being saved again."


class ConversationSaver(QObject):
    """Synchronizes the chat's `conversations` and `drafts` with the store. Unsaved changes stay in memory until they
    are saved.

    `is_writing(key)` returns whether this window is writing an answer in a conversation.
    """

    notified = Signal(str)
    """Emitted with a sentence for the user."""
    conversations_changed = Signal()
    """Emitted when conversations were added or removed, or a title changed."""
    messages_changed = Signal(str)
    """Emitted with the key of a conversation when another window changed its messages."""

    def __init__(
        self,
        store: ConversationStore,
        conversations: list[Conversation],
        drafts: dict[str, Draft],
        is_writing: Callable[[str], bool],
        parent: QObject,
    ) -> None:
        super().__init__(parent)
        self.store = store
        self._conversations = conversations
        self._drafts = drafts
        self._is_writing = is_writing
        self._unsaved: set[str] = set()
        self._unsaved_drafts: set[str] = set()
        self._failure = ""
        self._save_timer = QTimer(self, singleShot=True)
        self._save_timer.timeout.connect(self.save)
        self._reload_timer = QTimer(self, interval=RELOAD_MS)
        self._reload_timer.timeout.connect(self.reload_changes)
        self._reload_timer.start()

    def mark_changed(self, conversation: Conversation) -> None:
        """Mark a conversation as changed now, to be saved within `SAVE_DELAY_MS`."""
        conversation.changed_s = time.time()
        self._unsaved.add(conversation.key)
        self._save_within(SAVE_DELAY_MS)

    def mark_answer_changed(self, conversation: Conversation) -> None:
        """Mark an unfinished answer as changed, to be saved within `UNFINISHED_SAVE_INTERVAL_S`."""
        self._unsaved.add(conversation.key)
        if not self._save_timer.isActive():
            self._save_timer.start(round(UNFINISHED_SAVE_INTERVAL_S * 1000))

    def mark_draft_changed(self, key: str) -> None:
        self._unsaved_drafts.add(key)
        self._save_within(SAVE_DELAY_MS)

    def is_written_elsewhere(self, key: str) -> bool:
        return key in self.store.written_elsewhere

    def delete(self, conversation: Conversation) -> None:
        self._unsaved.discard(conversation.key)
        self._unsaved_drafts.discard(conversation.key)
        try:
            self.store.delete(conversation.key)
        except KvscopeError as error:
            self.notified.emit(str(error))

    def save(self) -> None:
        """Save all changes now. A failure is reported, and its changes are retried."""
        self._save_timer.stop()
        failure = ""
        for key in sorted(self._unsaved_drafts):
            try:
                self.store.save_draft(key, self._drafts.get(key, Draft()))
                self._unsaved_drafts.discard(key)
            except KvscopeError as error:
                failure = str(error)
        for key in sorted(self._unsaved):
            conversation = next((c for c in self._conversations if c.key == key), None)
            try:
                if conversation is not None and (conversation.messages or conversation.named):
                    self._save(conversation)
                self._unsaved.discard(key)
            except KvscopeError as error:
                failure = str(error)
        self._report_outcome(failure)

    def reload_changes(self) -> None:
        writing = {c.key for c in self._conversations if self._is_writing(c.key)}
        written_before = set(self.store.written_elsewhere)
        changes = self.store.read_changes(exclude=self._unsaved | writing)
        for theirs in changes.written:
            self._replace(theirs)
        deleted = set(changes.deleted)
        self._conversations[:] = [c for c in self._conversations if c.key not in deleted]
        if changes.written or changes.deleted or written_before != self.store.written_elsewhere:
            self.conversations_changed.emit()

    def shut_down(self) -> str:
        """Save, and close the file. Returns a message for the user, or "" if everything was saved."""
        self._reload_timer.stop()
        self.save()
        if self._unsaved or self._unsaved_drafts:
            self.save()  # reopens the file; this is the last chance to save
        self._save_timer.stop()
        self.store.close()
        return self._rescue()

    def _rescue(self) -> str:
        unsaved = [c for c in self._conversations if c.key in self._unsaved and (c.messages or c.named)]
        if not unsaved:
            return ""
        paths, is_all = write_rescue_files(self.store.folder, unsaved)
        return rescue_text(paths, is_all, self.store.folder)

    def _save(self, conversation: Conversation) -> None:
        is_writing = self._is_writing(conversation.key)
        try:
            self.store.save(conversation, sync=not is_writing, is_writing=is_writing)
        except ChangedElsewhere as conflict:
            self._merge(conversation, conflict.theirs)

    def _merge(self, ours: Conversation, theirs: Conversation) -> None:
        """Merge another window's copy into `ours`, and save the result. Messages of only one copy are kept."""
        our_last, their_path = ours.last, {message.key for message in theirs.path}
        ours.messages = merge_messages(ours.messages, theirs.messages)
        if our_last in their_path and not self._is_writing(ours.key):
            ours.last = theirs.last  # the other window only continued the path
        self.store.mark_seen(ours.key)
        self.store.save(ours, is_writing=self._is_writing(ours.key))
        if ours.last == our_last and theirs.last not in {message.key for message in ours.path}:
            self.notified.emit(f"“{ours.title}” was changed in two windows at the same time: both versions are kept.")
        self.messages_changed.emit(ours.key)
        self.conversations_changed.emit()

    def _replace(self, theirs: Conversation) -> None:
        ours = next((c for c in self._conversations if c.key == theirs.key), None)
        if ours is not None:
            update_from_copy(ours, theirs)
            self.messages_changed.emit(ours.key)
            return
        row = sum(c.changed_s > theirs.changed_s for c in self._conversations)
        self._conversations.insert(row, theirs)

    def _report_outcome(self, failure: str) -> None:
        if failure:
            self._save_timer.start(RETRY_MS)
            self.notified.emit(f"{failure[0].upper()}{failure[1:]}. Kept in memory; retrying.")
        elif self._failure:
            self.notified.emit(_SAVES_RECOVERED)
        self._failure = failure

    def _save_within(self, milliseconds: int) -> None:
        if not self._save_timer.isActive() or self._save_timer.remainingTime() > milliseconds:
            self._save_timer.start(milliseconds)


def update_from_copy(ours: Conversation, theirs: Conversation) -> None:
    """Replace the contents of `ours` by those of `theirs`. Equal messages stay the same objects, so that their cards
    are kept.
    """
    ours.messages, ours.last = merge_messages(ours.messages, theirs.messages), theirs.last
    ours.title, ours.named = theirs.title, theirs.named
    ours.system, ours.sampling, ours.adapter = theirs.system, theirs.sampling, theirs.adapter
    ours.num_answers, ours.tools = theirs.num_answers, theirs.tools
    ours.changed_s = theirs.changed_s


# Conversations that could not be saved when a window closed are written to files, wherever there is space.
#
# Files in the conversations' own folder have names that the store imports at the next start.
def write_rescue_files(folder: Path, conversations: Iterable[Conversation]) -> tuple[list[Path], bool]:
    """Write conversations to files. Returns the files, and whether they contain all conversations. Never raises."""
    all_conversations = list(conversations)
    paths = [path for path in (_write(folder, conversation) for conversation in all_conversations) if path is not None]
    return paths, len(paths) == len(all_conversations)


def rescue_text(paths: list[Path], is_all: bool, folder: Path) -> str:
    paths_text = ", ".join(str(path) for path in paths)
    if not is_all:
        exception = f" but {paths_text}" if paths_text else ""
        return f"Conversations could not be saved, and there was no space for a copy{exception}."
    if all(path.parent == folder for path in paths):
        return f"Conversations could not be saved; they are in {paths_text} and will be imported at the next start."
    return (
        f"Conversations could not be saved; they are in {paths_text}. Move them to {folder} to import them at the "
        "next start."
    )


def _write(folder: Path, conversation: Conversation) -> Path | None:
    data = msgspec.json.format(msgspec.json.encode(conversation), indent=1)
    for target_folder in _rescue_folders(folder):
        path = target_folder / f"{conversation.key}.json"
        try:
            _write_whole(path, data)
        except OSError:
            continue
        return path
    return None


def _rescue_folders(folder: Path) -> Iterator[Path]:
    yield folder
    yield Path.home()
    yield Path(tempfile.gettempdir())


def _write_whole(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_whole(path, data, private=True, sync=True)
