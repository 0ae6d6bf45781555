"""Keys that distinguish texts of SGLang with equal tokens (adapter, cache salt, extra key of the radix tree), and media
in prompts.

Reads only attributes of SGLang's requests that are immutable.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from kvscope_inside.cached_texts import BlockNotes

MAX_BEGINNINGS: Final = 10_000
"""Maximum number of recorded first pages of texts; the oldest are dropped first."""
NameOf = Callable[[str], str | None]
"""Function that returns an adapter's name for SGLang's adapter id; None if unknown."""


class TextKey(NamedTuple):
    """Adapter, cache salt and extra key of a text, on which its hashes depend in addition to its tokens. Equal
    tokens with different keys share no pages.
    """

    adapter: str = ""
    salt: str = ""
    other: str = ""

    @property
    def seed(self) -> int:
        """Initial value of `text_sums` for texts with this key, so that equal tokens have different sums under
        different keys; 0 for an empty key.
        """
        if not any(self):
            return 0
        return int.from_bytes(hashlib.blake2b(repr(tuple(self)).encode(), digest_size=8).digest(), "little")

    def notes(self) -> BlockNotes:
        labels = zip(("LoRA", "Cache salt", "Extra key"), self, strict=True)
        return tuple((name, value) for name, value in labels if value)


def key_of(request: Any, name_of: NameOf = lambda _: None) -> TextKey:
    """Return the text key of a request. The adapter's id, which SGLang appends to the extra key, is removed from it."""
    adapter, extra = str(getattr(request, "lora_id", None) or ""), str(getattr(request, "extra_key", None) or "")
    salt = str(getattr(request, "cache_salt", None) or "")
    return TextKey((name_of(adapter) or adapter) if adapter else "", salt, extra.removesuffix(adapter))


def media_of(request: Any) -> list[tuple[str, int, int]]:
    """Return the kind and the positions of the first and last token of each image or audio clip in the prompt."""
    items = getattr(getattr(request, "multimodal_inputs", None), "mm_items", None) or ()
    media = []
    for item in items:
        kind = str(getattr(getattr(item, "modality", None), "name", "") or "image").capitalize()
        media += [(kind, int(first), int(last)) for first, last in getattr(item, "offsets", None) or ()]
    return media


class TextBeginnings:
    """Records under which text keys equal first pages are cached. Used on the publishing thread only."""

    def __init__(self) -> None:
        self._hashes_by_key: OrderedDict[int, dict[TextKey, int]] = OrderedDict()

    def record(self, plain: int, key: TextKey, own: int) -> None:
        """Record a text under `key`. `plain` is the hash of its first page without the key, `own` the hash with
        the key.
        """
        self._hashes_by_key.setdefault(plain, {})[key] = own
        self._hashes_by_key.move_to_end(plain)
        while len(self._hashes_by_key) > MAX_BEGINNINGS:
            self._hashes_by_key.popitem(last=False)

    def explain_miss(self, plain: int, key: TextKey, is_cached: Callable[[int], bool]) -> str:
        """Return why a text's first page is not cached: "adapter" or "salt" if it is cached under another
        adapter or salt, otherwise "new".
        """
        others = self._hashes_by_key.get(plain, {})
        for other, own in others.items():
            if other != key and is_cached(own):
                return "adapter" if other.adapter != key.adapter else "salt" if other.salt != key.salt else "new"
        return "new"
