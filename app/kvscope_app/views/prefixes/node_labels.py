"""What each node is called: its text, and where brothers begin alike only from where they do not. Before the text of a
whole prompt stands what else its blocks are cached for: an adapter, a salt, an image.

Owns labels of one tree, made when they are first looked at; `forget` when texts came or the tree is another.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Final

from kvscope_app.views.prefixes.prefix_columns import PrefixMoment
from kvscope_telemetry.prefixes.tree import ROOT

LABEL_BLOCKS: Final = 4
"""Whose text is looked at: more than fits into most rows."""
TIP_BLOCKS: Final = 16
_MAX_BROTHERS: Final = 256
"""That a label is held against."""
_ALIKE: Final = 24
"""Characters that brothers may share before they are left out."""
_KEPT_BEFORE: Final = 14


class Labels:
    """`text_of` tells what is known of the text of a hash, `notes_of` what its block is cached for beside its text."""

    def __init__(
        self, text_of: Callable[[int], str | None], notes_of: Callable[[int], str] = lambda block_hash: ""
    ) -> None:
        self._text_of, self._notes_of = text_of, notes_of
        self._moment: PrefixMoment | None = None
        self._made: dict[int, str | None] = {}

    def forget(self, moment: PrefixMoment | None) -> None:
        """Of this moment from now on."""
        self._moment = moment
        self._made.clear()

    def label(self, node: int) -> str | None:
        """One line for a row; None where no text is known."""
        if self._moment is None:
            return None
        if node not in self._made:
            self._label_brothers(self._moment, node)
        return self._made[node]

    def text(self, node: int, at_most: int) -> str | None:
        """Text of the first blocks, as far as they are known one after another."""
        moment = self._moment
        if moment is None:
            return None
        parts: list[str] = []
        for block_hash, _ in moment.tree.blocks_of(node, at_most):
            text = self._text_of(block_hash)
            if text is None:
                break
            parts.append(text)
        if not parts:
            return None
        return "".join(parts) + ("…" if len(parts) < moment.tree.num_blocks[node] else "")

    def _label_brothers(self, moment: PrefixMoment, node: int) -> None:
        brothers = moment.tree.children_of(int(moment.tree.parent[node])).tolist()
        if len(brothers) > _MAX_BROTHERS:
            brothers = [node]
        lines = {each: self._line(each) for each in brothers}
        notes = {each: self._note(moment, each) for each in brothers}
        alike = dict.fromkeys(brothers, 0)
        known = sorted((notes[each], line, each) for each, line in lines.items() if line is not None)
        for (note, line, one), (other_note, after, other) in pairwise(known):
            common = _num_alike(line, after) if note == other_note else 0
            alike[one], alike[other] = max(alike[one], common), common
        self._made |= dict.fromkeys(brothers)
        for note, line, each in known:
            is_cut = _ALIKE < alike[each] < len(line) - 1
            shown = f"…{_from_word(line, alike[each] - _KEPT_BEFORE)}" if is_cut else line
            self._made[each] = f"{note}{shown}"

    def _note(self, moment: PrefixMoment, node: int) -> str:
        """What all below it has in common beside its text."""
        if moment.tree.parent[node] != ROOT:
            return ""
        notes = [self._notes_of(block_hash) for block_hash, _ in moment.tree.blocks_of(node, 1)]
        return f"{notes[0]} · " if notes and notes[0] else ""

    def _line(self, node: int) -> str | None:
        text = self.text(node, LABEL_BLOCKS)
        return None if text is None else " ".join(text.split()) or "⏎"


def _num_alike(one: str, other: str) -> int:
    """Characters from the first that are the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _from_word(line: str, start: int) -> str:
    """From the first word that begins at `start` or a little after."""
    space = line.find(" ", start, start + _KEPT_BEFORE)
    return line[space + 1 :] if space >= 0 else line[start:]
