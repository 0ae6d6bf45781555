"""Block contents of a source that knows them itself, with the same requests and replies as an engine.

Owns the reading threads: the first reply may have to load a tokenizer. Imports no Qt.
"""

from __future__ import annotations

from functools import partial

from kvscope_app.session.background import Background
from kvscope_app.session.links import KnowsContents
from kvscope_telemetry.messages.commands import BlockText, GetBlockText, Reply
from kvscope_telemetry.recordings.read_budget import ProgressCallback


class KnownContents:
    """Accepts questions and returns the replies later."""

    def __init__(self, source: KnowsContents) -> None:
        self._source = source
        self._open: list[Background[BlockText]] = []

    def ask(self, question: GetBlockText) -> None:
        """Read the contents on a thread. Never blocks."""
        self._open.append(Background(partial(self._answer, question), "kvscope-contents"))

    def poll_replies(self) -> list[Reply]:
        """Return and remove the replies since the last call. A failed question has none."""
        if not self._open:
            return []
        over = [work for work in self._open if work.is_over]
        self._open = [work for work in self._open if work not in over]
        return [work.made for work in over if work.made is not None]

    def _answer(self, question: GetBlockText, watch: ProgressCallback) -> BlockText:
        return BlockText(contents=tuple(self._source.contents(question.blocks)), tag=question.tag)
