"""What a text of SGLang's is of beside its tokens: the adapter, the salt and the key that keep like tokens apart in its
radix tree, and the images and sounds that tokens stand for.

Reads of SGLang's requests only what never changes again.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from kvscope_inside.cached_texts import BlockNotes

MAX_KNOWN: Final = 10_000
"""Beginnings of texts that are remembered, the newest."""
NameOf = Callable[[str], str | None]
"""Of an adapter, by the id that SGLang gave it."""


class TextKey(NamedTuple):
    """Like texts with other keys are other texts."""

    adapter: str = ""
    salt: str = ""
    other: str = ""

    @property
    def seed(self) -> int:
        """That sums of a text begin with."""
        if not any(self):
            return 0
        return int.from_bytes(hashlib.blake2b(repr(tuple(self)).encode(), digest_size=8).digest(), "little")

    def notes(self) -> BlockNotes:
        """Of each block of the text."""
        words = zip(("LoRA", "Cache salt", "Extra key"), self, strict=True)
        return tuple((name, value) for name, value in words if value)


def key_of(request: Any, name_of: NameOf = lambda _: None) -> TextKey:
    """SGLang appends the adapter's id to the extra key."""
    adapter, extra = str(getattr(request, "lora_id", None) or ""), str(getattr(request, "extra_key", None) or "")
    salt = str(getattr(request, "cache_salt", None) or "")
    return TextKey((name_of(adapter) or adapter) if adapter else "", salt, extra.removesuffix(adapter))


def media_of(request: Any) -> list[tuple[str, int, int]]:
    """Of images and sounds in its prompt: what it is, and the first and the last token that stand for it."""
    items = getattr(getattr(request, "multimodal_inputs", None), "mm_items", None) or ()
    found = []
    for item in items:
        kind = str(getattr(getattr(item, "modality", None), "name", "") or "image").capitalize()
        found += [(kind, int(first), int(last)) for first, last in getattr(item, "offsets", None) or ()]
    return found


class Beginnings:
    """Under which keys texts that begin alike are cached. Belongs to the thread that tells."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, dict[TextKey, int]] = OrderedDict()

    def note(self, plain: int, key: TextKey, own: int) -> None:
        """A text whose first page has the hash `plain` without its key, and `own` with it."""
        self._known.setdefault(plain, {})[key] = own
        self._known.move_to_end(plain)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def missed(self, plain: int, key: TextKey, is_cached: Callable[[int], bool]) -> str:
        """Why such a text is not there: "adapter", "salt", or "new"."""
        others = self._known.get(plain, {})
        for other, own in others.items():
            if other != key and is_cached(own):
                return "adapter" if other.adapter != key.adapter else "salt" if other.salt != key.salt else "new"
        return "new"
