"""When conversations are saved, what is done when that fails, and what other windows wrote meanwhile. No widgets."""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
from PySide6.QtCore import QObject, QTimer, Signal

from kvscope_app.views.console.conversation import Conversation, Message
from kvscope_app.views.console.store import ChangedElsewhere, ConversationStore
from kvscope_telemetry.errors import KvscopeError

SAVE_AFTER_MS: Final = 800
SAVE_WRITING_S: Final = 2.0
"""How much of an answer that is being written may be lost when the desktop is killed."""
RETRY_MS: Final = 5000
"""After a save that failed; what was not saved is held until one succeeds."""
LOOK_MS: Final = 1000
"""How often is looked for what other windows wrote."""
_SAVED_AGAIN: Final = "Conversations are being saved again."


class Keeper(QObject):
    """Keeps `conversations`, the chat's own list, and the store's the same. `is_writing` asks by key for an answer."""

    notified = Signal(str)
    """Something a person must read, in one line."""
    listed = Signal()
    """Conversations came, went, or changed their title."""
    messages_changed = Signal(str)
    """Another window changed the messages of the conversation with this key."""

    def __init__(
        self,
        store: ConversationStore,
        conversations: list[Conversation],
        is_writing: Callable[[str], bool],
        parent: QObject,
    ) -> None:
        super().__init__(parent)
        self.store = store
        self._conversations = conversations
        self._is_writing = is_writing
        self._unsaved: set[str] = set()
        self._failure = ""
        self._save_timer = QTimer(self, singleShot=True)
        self._save_timer.timeout.connect(self.save)
        self._look_timer = QTimer(self, interval=LOOK_MS)
        self._look_timer.timeout.connect(self.look)
        self._look_timer.start()

    def touch(self, conversation: Conversation) -> None:
        """It changed: save it soon."""
        conversation.changed_s = time.time()
        self._unsaved.add(conversation.key)
        self._save_within(SAVE_AFTER_MS)

    def touch_partial(self, conversation: Conversation) -> None:
        """Its answer goes on: the save timer does not start anew with each token."""
        self._unsaved.add(conversation.key)
        if not self._save_timer.isActive():
            self._save_timer.start(round(SAVE_WRITING_S * 1000))

    def is_written_elsewhere(self, key: str) -> bool:
        """Whether another window writes an answer there now."""
        return key in self.store.written_elsewhere

    def delete(self, conversation: Conversation) -> None:
        """Remove it from the disk."""
        self._unsaved.discard(conversation.key)
        try:
            self.store.delete(conversation.key)
        except KvscopeError as error:
            self.notified.emit(str(error))

    def save(self) -> None:
        """Write what changed now. What cannot be written is told of, held and tried again."""
        self._save_timer.stop()
        failure = ""
        for key in sorted(self._unsaved):
            conversation = next((c for c in self._conversations if c.key == key), None)
            try:
                if conversation is not None and (conversation.messages or conversation.named):
                    self._save(conversation)
                self._unsaved.discard(key)
            except KvscopeError as error:
                failure = str(error)
        self._tell_how_it_went(failure)

    def look(self) -> None:
        """Take in what other windows wrote."""
        busy = {c.key for c in self._conversations if self._is_writing(c.key)}
        before = set(self.store.written_elsewhere)
        changes = self.store.take_changes(but=self._unsaved | busy)
        for theirs in changes.written:
            self._take(theirs)
        gone = set(changes.deleted)
        self._conversations[:] = [c for c in self._conversations if c.key not in gone]
        if changes.written or changes.deleted or before != self.store.written_elsewhere:
            self.listed.emit()

    def shut_down(self) -> str:
        """The window closes: save, and give the file back. What a person must read then, empty where all is well."""
        self._look_timer.stop()
        self.save()
        if self._unsaved:
            self.save()  # it opens the file anew; there will be no later
        self._save_timer.stop()
        self.store.close()
        return self._rescue()

    def _rescue(self) -> str:
        unsaved = [c for c in self._conversations if c.key in self._unsaved and (c.messages or c.named)]
        if not unsaved:
            return ""
        paths, is_all = rescue(self.store.folder, unsaved)
        return rescue_text(paths, is_all, self.store.folder)

    def _save(self, conversation: Conversation) -> None:
        is_writing = self._is_writing(conversation.key)
        try:
            self.store.save(conversation, sync=not is_writing, is_writing=is_writing)
        except ChangedElsewhere as changed:
            self._join(conversation, changed.theirs)

    def _join(self, ours: Conversation, theirs: Conversation) -> None:
        """Both windows wrote: one of them holds all there is, or both are kept."""
        if goes_on_from(ours, theirs):
            self.store.accept(ours.key)
            self.store.save(ours, is_writing=self._is_writing(ours.key))
        elif goes_on_from(theirs, ours) and not self._is_writing(ours.key):
            self.store.accept(ours.key)
            self._take(theirs)
            self.listed.emit()
        else:
            self.store.accept(ours.key)
            self._part(ours, theirs)

    def _part(self, ours: Conversation, theirs: Conversation) -> None:
        """Ours goes on under a key of its own; theirs stands beside it."""
        ours.key, ours.title = secrets.token_hex(8), f"{ours.title} (this window)"
        self._conversations.insert(self._conversations.index(ours) + 1, theirs)
        self._unsaved.add(ours.key)
        self._save_within(0)
        self.listed.emit()
        self.notified.emit(f"“{theirs.title}” was changed in two windows at once: both are kept.")

    def _take(self, theirs: Conversation) -> None:
        ours = next((c for c in self._conversations if c.key == theirs.key), None)
        if ours is not None:
            take_over(ours, theirs)
            self.messages_changed.emit(ours.key)
            return
        newer = sum(c.changed_s > theirs.changed_s for c in self._conversations)
        self._conversations.insert(newer, theirs)

    def _tell_how_it_went(self, failure: str) -> None:
        if failure:
            self._save_timer.start(RETRY_MS)
            self.notified.emit(f"{failure[0].upper()}{failure[1:]}. Kept in memory; retrying.")
        elif self._failure:
            self.notified.emit(_SAVED_AGAIN)
        self._failure = failure

    def _save_within(self, milliseconds: int) -> None:
        if not self._save_timer.isActive() or self._save_timer.remainingTime() > milliseconds:
            self._save_timer.start(milliseconds)


# Two windows changed the same conversation: which messages stand, so that no word is lost.
def goes_on_from(later: Conversation, earlier: Conversation) -> bool:
    """Whether `later` holds every word of `earlier`: the same messages, the last one perhaps longer, and more."""
    return _covers(later.messages, earlier.messages)


def take_over(ours: Conversation, theirs: Conversation) -> None:
    """Become `theirs`. Messages that are the same stay the same objects: what shows them need not draw them anew."""
    same = 0
    while same < min(len(ours.messages), len(theirs.messages)) and ours.messages[same] == theirs.messages[same]:
        same += 1
    ours.messages[same:] = theirs.messages[same:]
    ours.title, ours.named = theirs.title, theirs.named
    ours.system, ours.sampling, ours.adapter = theirs.system, theirs.sampling, theirs.adapter
    ours.changed_s = theirs.changed_s


def _covers(later: Sequence[Message], earlier: Sequence[Message]) -> bool:
    if len(later) < len(earlier):
        return False
    if not earlier:
        return True
    last, its_successor = earlier[-1], later[len(earlier) - 1]
    before = zip(earlier[:-1], later, strict=False)
    return (
        all(one.role == other.role and one.content == other.content for one, other in before)
        and last.role == its_successor.role
        and its_successor.content.startswith(last.content)
    )


# Words that could not be saved when a window closed: written as files, where there is room for them.
#
# In the conversations' own folder they are named as the store takes them in at the next start.
def rescue(folder: Path, conversations: Iterable[Conversation]) -> tuple[list[Path], bool]:
    """The files written, and whether all that was given is in them. Raises nothing."""
    given = list(conversations)
    paths = [path for path in (_write(folder, conversation) for conversation in given) if path is not None]
    return paths, len(paths) == len(given)


def rescue_text(paths: list[Path], is_all: bool, folder: Path) -> str:
    """One line that says where they are."""
    where = ", ".join(str(path) for path in paths)
    if not is_all:
        return f"Conversations could not be saved, and there was no space for a copy{f' but {where}' if where else ''}."
    if all(path.parent == folder for path in paths):
        return f"Conversations could not be saved; they are in {where} and will be imported at the next start."
    return (
        f"Conversations could not be saved; they are in {where}. Move them to {folder} to import them at the "
        "next start."
    )


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
