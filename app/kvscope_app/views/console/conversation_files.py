"""Exports conversations to files and imports them. Reading and writing files runs on another thread."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
from PySide6.QtCore import QObject, Signal
from PySide6.QtWidgets import QWidget

from kvscope_app.session.background import Background
from kvscope_app.session.background_watch import BackgroundWatch
from kvscope_app.ui.file_dialogs import ask_open, ask_save
from kvscope_app.ui.number_text import plural
from kvscope_app.views.console.chat import Chat
from kvscope_app.views.console.conversation import Conversation, Draft
from kvscope_app.views.console.conversation_export import to_json, to_markdown
from kvscope_app.views.console.conversation_import import is_same, read_conversations, unused_key
from kvscope_app.views.console.stored_conversations import read_stored, stored_revisions
from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.whole_file import write_whole

_EXPORT_FILTERS: Final = "Markdown (*.md);;JSON, can be imported again (*.json)"
_IMPORT_FILTERS: Final = "Conversations (*.json);;All files (*)"


class ConversationFiles(QObject):
    """Export and import of the conversations of `chat`. `show` is called with a conversation to be shown."""

    reported = Signal(str)
    """Emitted with a sentence for the user: what was done, or why it failed."""
    done = Signal(str, object, object)
    """Emitted after an import with the arguments of `View.done`."""

    def __init__(self, chat: Chat, window: QWidget, show: Callable[[Conversation], None]) -> None:
        super().__init__(window)
        self._chat, self._window, self._show = chat, window, show
        self._is_running = False

    def ask_export(self, conversation: Conversation) -> None:
        if not conversation.messages:
            self.reported.emit("This conversation has no messages to export.")
            return
        proposed = Path(f"{_file_name(conversation.title)}.md")
        ask_save(self._window, "Export conversation", proposed, _EXPORT_FILTERS, partial(self.export, conversation))

    def ask_export_all(self) -> None:
        proposed = Path("kvscope-conversations.json")
        filters = ";;".join(reversed(_EXPORT_FILTERS.split(";;")))
        ask_save(self._window, "Export all conversations", proposed, filters, self.export_all)

    def ask_import(self) -> None:
        ask_open(self._window, "Import conversations", "", _IMPORT_FILTERS, self.import_file)

    def export(self, conversation: Conversation, path: str) -> None:
        """Write one conversation: as JSON if the name ends in `.json`, otherwise as Markdown."""
        snapshot = msgspec.json.decode(msgspec.json.encode(conversation), type=Conversation)
        self._run(partial(_write, Path(path), lambda: [snapshot]), self._on_exported)

    def export_all(self, path: str) -> None:
        """Write all stored conversations, also those that are not loaded."""
        self._chat.save()
        loaded = [c for c in self._chat.conversations if c.messages]
        snapshot = msgspec.json.decode(msgspec.json.encode(loaded), type=list[Conversation])
        folder = self._chat.folder
        self._run(partial(_write, Path(path), lambda: _with_stored(snapshot, folder)), self._on_exported)

    def import_file(self, path: str) -> None:
        """Add the conversations of a file. Existing ones are never changed; equal ones are not added again."""
        self._run(partial(read_conversations, Path(path)), partial(self._add, Path(path).name))

    def _run(self, work: Callable[[], object], then: Callable[[object], None]) -> None:
        if self._is_running:
            self.reported.emit("Another export or import is still running: try again when it has ended.")
            return
        self._is_running = True
        task = Background(lambda _progress: work(), "kvscope-conversation-files")
        BackgroundWatch(task, partial(self._on_end, task, then), self)

    def _on_end(self, task: Background[object], then: Callable[[object], None]) -> None:
        self._is_running = False
        if task.failure:
            self.reported.emit(f"{task.failure}.")
        else:
            then(task.result)

    def _on_exported(self, text: object) -> None:
        self.reported.emit(str(text))

    def _add(self, name: str, conversations: object) -> None:
        assert isinstance(conversations, list)
        self._chat.save()
        added: list[Conversation] = []
        keys = set()
        for conversation in conversations:
            ours = self._chat.open_stored(conversation.key)
            if ours is not None and is_same(ours, conversation):
                continue
            if ours is not None or conversation.key in keys:
                conversation.key = unused_key()
            keys.add(conversation.key)
            added.append(conversation)
        num_known = len(conversations) - len(added)
        known = f" {plural(num_known, 'conversation')} already here." if num_known else ""
        if not added or self._store(added):
            self.reported.emit(f"{plural(len(added), 'conversation')} imported from {name}.{known}")
        if added and self._chat.find(added[0].key) is not None:
            snapshots = [msgspec.json.encode(conversation) for conversation in added]
            step_name = f"importing {plural(len(added), 'conversation')}"
            self.done.emit(step_name, partial(self._undo, snapshots), partial(self._redo, snapshots))
            self._show(max(added, key=lambda conversation: conversation.changed_s))

    def _store(self, conversations: Sequence[Conversation]) -> bool:
        try:
            self._chat.add_stored(conversations)
        except KvscopeError as error:
            self.reported.emit(f"{str(error)[0].upper()}{str(error)[1:]}.")
            return False
        return True

    def _undo(self, snapshots: Sequence[bytes]) -> None:
        """Remove imported conversations, except those that were changed since."""
        self._chat.reload_changes()
        unchanged = []
        for snapshot in snapshots:
            imported = msgspec.json.decode(snapshot, type=Conversation)
            ours = self._chat.find(imported.key)
            if ours is not None and is_same(ours, imported) and self._chat.draft_of(ours.key) == Draft():
                unchanged.append(ours)
        try:
            self._chat.remove_stored(unchanged)
        except KvscopeError as error:
            self.reported.emit(f"{str(error)[0].upper()}{str(error)[1:]}.")
            return
        num_kept = len(snapshots) - len(unchanged)
        if num_kept:
            self.reported.emit(f"{plural(num_kept, 'imported conversation')} kept: changed since the import.")

    def _redo(self, snapshots: Sequence[bytes]) -> None:
        imported = [msgspec.json.decode(snapshot, type=Conversation) for snapshot in snapshots]
        self._store([each for each in imported if self._chat.open_stored(each.key) is None])


def _write(path: Path, conversations: Callable[[], list[Conversation]]) -> str:
    """Write a file. Returns a sentence for the user. Raises KvscopeError if writing fails."""
    content = conversations()
    is_json = path.suffix.lower() == ".json"
    try:
        write_whole(path, to_json(content) if is_json else to_markdown(content).encode(errors="replace"))
    except OSError as error:
        raise KvscopeError(f"{path.name} was not written: {error.strerror or error}") from error
    return f"{plural(len(content), 'conversation')} exported to {path}."


def _with_stored(loaded: list[Conversation], folder: Path) -> list[Conversation]:
    by_key = {stored.key: stored for stored in read_stored(folder, stored_revisions(folder))}
    by_key |= {conversation.key: conversation for conversation in loaded}
    return sorted(by_key.values(), key=lambda conversation: -conversation.changed_s)


def _file_name(title: str) -> str:
    return re.sub(r"[^\w .()-]+", "", title).strip(" .")[:60] or "conversation"
