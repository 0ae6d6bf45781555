"""Token ids to text, one at a time, as an answer streams; stop strings end it wherever tokens are cut.

Owns the text of one answer that is not yet told. Knows a decoder, and no model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

REPLACEMENT: Final = "�"
WINDOW: Final = 16
"""Tokens decoded again for each new one; the first few give the rest their context (leading spaces)."""
MAX_WINDOW: Final = 256
"""Tokens of broken bytes in a row after which nobody waits for the character to become whole."""

Decode = Callable[[Sequence[int]], str]


class IncrementalDecoder:
    """What each token adds to the text of those before it: first of all to that of `context`, whose own is not told.

    The pieces joined are the text of all tokens decoded at once, less that of the context. A character whose bytes
    are spread over tokens comes with the last of them.
    """

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids: list[int] = list(context[-WINDOW // 2 :])
        text = decode(self._ids) if self._ids else ""
        self._told = len(text.rstrip(REPLACEMENT))
        """Characters of the window's text that were handed out."""
        self._cut = len(self._ids) if self._told == len(text) else 0
        """Where the window can be cut: its tokens from there on start at a whole character. 0: nowhere."""

    def add(self, token_id: int) -> str:
        """The text that `token_id` completes."""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if not text.endswith(REPLACEMENT):
            piece, self._told = text[self._told :], len(text)
            self._slide()
            return piece
        return self.flush() if len(self._ids) >= MAX_WINDOW else ""

    def flush(self) -> str:
        """What is left at the end, with replacement characters for bytes that never became one."""
        piece = self._decode(self._ids)[self._told :] if self._ids else ""
        self._ids, self._told, self._cut = [], 0, 0
        return piece

    def _slide(self) -> None:
        """At the end of a whole character: note it as the next cut, or drop what is before the last one."""
        if not self._cut:
            if len(self._ids) >= WINDOW // 2:
                self._cut = len(self._ids)
            return
        if len(self._ids) < WINDOW:
            return
        context = self._ids[self._cut :]
        text = self._decode(context)
        if text and not text.endswith(REPLACEMENT):
            self._ids, self._told, self._cut = context, len(text), 0


class Detokenizer:
    """The text of one answer as it streams, up to the first of its stop strings.

    Text that may be the beginning of a stop string is held back until the next tokens tell.
    """

    def __init__(self, decode: Decode, stop: Sequence[str] = (), context: Sequence[int] = ()) -> None:
        self._decoder = IncrementalDecoder(decode, context)
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False
        """Whether a stop string came. Then the text ends before it, and nothing follows."""

    def add(self, token_id: int, *, may_stop: bool = True) -> str:
        """The text that can be told now. Without `may_stop` (below `min_tokens`) no stop string counts."""
        if self.stopped:
            return ""
        return self._take(self._decoder.add(token_id), may_stop)

    def flush(self) -> str:
        """The rest, at the end of an answer; nothing after a stop string."""
        if self.stopped:
            return ""
        piece = self._take(self._decoder.flush(), may_stop=True)
        rest, self._held = piece + self._held, ""
        return rest

    def _take(self, piece: str, may_stop: bool) -> str:
        if not self._stop or not may_stop:
            piece, self._held = self._held + piece, ""
            return piece
        text = self._held + piece
        found = _first_stop(text, self._stop)
        if found is not None:
            self.stopped, self._held = True, ""
            return text[:found]
        told = len(text) - _held_length(text, self._stop)
        self._held = text[told:]
        return text[:told]


def _first_stop(text: str, stop: Sequence[str]) -> int | None:
    """Where the earliest stop string begins."""
    places = [place for place in (text.find(string) for string in stop) if place >= 0]
    return min(places, default=None)


def _held_length(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of `text` that is the beginning of a stop string."""
    return max(_overlap(text, string) for string in stop)


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of `text` that `string` begins with, `string` itself not counted."""
    place = text.find(string[0], max(0, len(text) - len(string) + 1))
    while place >= 0 and not string.startswith(text[place:]):
        place = text.find(string[0], place + 1)
    return len(text) - place if place >= 0 else 0
