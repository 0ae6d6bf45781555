"""Search over titles and messages of all stored conversations. Imports no Qt.

The texts are kept in memory after the first search, and later searches read only the conversations that changed. An
index of SQLite would have to be kept up to date by each earlier version of kvscope that writes the database.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvscope_app.views.console.conversation import Conversation, Message
from kvscope_app.views.console.stored_conversations import read_stored, stored_revisions

MAX_HITS: Final = 100
_EXCERPT_CHARS: Final = 90
_CHARS_BEFORE: Final = 24


@dataclass(frozen=True, slots=True)
class SearchHit:
    """Conversation that has all words. `message` is the key of the message with most of them, "" for none."""

    key: str
    title: str
    changed_s: float
    message: str
    excerpt: str
    """Text around the first word in the message."""


@dataclass(frozen=True, slots=True)
class _IndexedText:
    revision: int
    changed_s: float
    text: str
    """Folded title and messages."""


class SearchIndex:
    """Index of the database in `folder`. Only one thread at a time may use it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._texts: dict[str, _IndexedText] = {}

    def search(self, query: str) -> list[SearchHit]:
        """Return at most `MAX_HITS` conversations that have all words of `query`, newest first.

        Case is ignored. The words may be in different messages, and in versions that are not shown.

        Raises:
            KvscopeError: The database could not be read.
        """
        words = fold(query).split()
        if not words:
            return []
        self._update()
        found = [(text.changed_s, key) for key, text in self._texts.items() if all(word in text.text for word in words)]
        keys = [key for _, key in sorted(found, reverse=True)[:MAX_HITS]]
        return [_hit(conversation, words) for conversation in read_stored(self._folder, keys)]

    def _update(self) -> None:
        revisions = stored_revisions(self._folder)
        self._texts = {key: text for key, text in self._texts.items() if revisions.get(key) == text.revision}
        for conversation in read_stored(self._folder, [key for key in revisions if key not in self._texts]):
            texts = [conversation.title, *(message.sent_text for message in conversation.messages)]
            self._texts[conversation.key] = _IndexedText(
                revisions[conversation.key], conversation.changed_s, fold("\n".join(texts))
            )


def fold(text: str) -> str:
    """Return `text` in a form in which texts that differ only in case, or in how accents are encoded, are equal."""
    return unicodedata.normalize("NFC", text).casefold()


def _hit(conversation: Conversation, words: Sequence[str]) -> SearchHit:
    shown = {message.key for message in conversation.path}

    def rank(message: Message) -> tuple[int, bool]:
        text = fold(message.sent_text)
        return sum(word in text for word in words), message.key in shown

    best = max(conversation.messages, key=rank, default=None)
    if best is None or not rank(best)[0]:
        return SearchHit(conversation.key, conversation.title, conversation.changed_s, "", "")
    excerpt = _excerpt(best.sent_text, words)
    return SearchHit(conversation.key, conversation.title, conversation.changed_s, best.key, excerpt)


def _excerpt(text: str, words: Sequence[str]) -> str:
    line = " ".join(text.split())
    match = re.search("|".join(re.escape(word) for word in words), line, re.IGNORECASE)
    start = max(match.start() - _CHARS_BEFORE, 0) if match else 0  # none if folding changed the word's length
    part = line[start : start + _EXCERPT_CHARS]
    return f"{'…' if start else ''}{part}{'…' if start + _EXCERPT_CHARS < len(line) else ''}"
