"""Labels of prefix tree nodes: their text or, if siblings share a long beginning, the text from where they differ.

The label of a root node begins with the properties other than text that its blocks are cached for, such as an adapter,
a salt or an image. Owns the labels of one tree, which are created when needed. Call `clear` when the tree changed or
more texts are known.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Final

from kvscope_app.views.prefixes.prefix_columns import PrefixMoment
from kvscope_telemetry.prefixes.tree import ROOT

LABEL_BLOCKS: Final = 4
"""Maximum number of blocks whose text is used for a label. Most table rows have no space for more."""
TIP_BLOCKS: Final = 16
_MAX_SIBLINGS: Final = 256
_MAX_SHOWN_PREFIX: Final = 24
"""If siblings share a beginning of more characters than this, it is left out of their labels."""
_CONTEXT_CHARACTERS: Final = 14


class NodeLabels:
    """Labels of one tree.

    `text_of` returns the text of a block hash, or None if unknown. `notes_of` returns the properties other than text
    that the block is cached for, such as an adapter.
    """

    def __init__(
        self, text_of: Callable[[int], str | None], notes_of: Callable[[int], str] = lambda block_hash: ""
    ) -> None:
        self._text_of, self._notes_of = text_of, notes_of
        self._moment: PrefixMoment | None = None
        self._labels: dict[int, str | None] = {}

    def clear(self, moment: PrefixMoment | None) -> None:
        """Drop all labels. New ones are created from the tree of `moment`."""
        self._moment = moment
        self._labels.clear()

    def label(self, node: int) -> str | None:
        """Return the node's label without line breaks, or None if its text is unknown."""
        if self._moment is None:
            return None
        if node not in self._labels:
            self._label_siblings(self._moment, node)
        return self._labels[node]

    def text(self, node: int, at_most: int) -> str | None:
        """Return the text of the node's first `at_most` blocks, up to the first block with unknown text. None if the
        first block's text is unknown.
        """
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

    def _label_siblings(self, moment: PrefixMoment, node: int) -> None:
        siblings = moment.tree.children_of(int(moment.tree.parent[node])).tolist()
        if len(siblings) > _MAX_SIBLINGS:
            siblings = [node]
        lines = {each: self._line(each) for each in siblings}
        notes = {each: self._note_prefix(moment, each) for each in siblings}
        common_lengths = dict.fromkeys(siblings, 0)
        sorted_lines = sorted((notes[each], line, each) for each, line in lines.items() if line is not None)
        for (note, line, current), (other_note, other_line, other) in pairwise(sorted_lines):
            common = _common_length(line, other_line) if note == other_note else 0
            common_lengths[current], common_lengths[other] = max(common_lengths[current], common), common
        self._labels |= dict.fromkeys(siblings)
        for note, line, each in sorted_lines:
            is_shortened = _MAX_SHOWN_PREFIX < common_lengths[each] < len(line) - 1
            text = (
                f"…{_text_from_next_word(line, common_lengths[each] - _CONTEXT_CHARACTERS)}" if is_shortened else line
            )
            self._labels[each] = f"{note}{text}"

    def _note_prefix(self, moment: PrefixMoment, node: int) -> str:
        if moment.tree.parent[node] != ROOT:
            return ""
        notes = [self._notes_of(block_hash) for block_hash, _ in moment.tree.blocks_of(node, 1)]
        return f"{notes[0]} · " if notes and notes[0] else ""

    def _line(self, node: int) -> str | None:
        text = self.text(node, LABEL_BLOCKS)
        return None if text is None else " ".join(text.split()) or "⏎"


def _common_length(first: str, second: str) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))


def _text_from_next_word(line: str, start: int) -> str:
    space = line.find(" ", start, start + _CONTEXT_CHARACTERS)
    return line[space + 1 :] if space >= 0 else line[start:]
