"""Block contents of a source that knows them itself, with the same requests and replies as an engine.

Owns the reading threads: the first reply may have to load a tokenizer. Imports no Qt.
"""

from __future__ import annotations

from functools import partial

from kvscope_app.session.background import Background
from kvscope_app.session.links import BlockContentSource
from kvscope_telemetry.messages.commands import BlockText, GetBlockText, Reply
from kvscope_telemetry.recordings.read_budget import ProgressCallback


class BlockContentService:
    """Accepts questions and returns the replies later."""

    def __init__(self, source: BlockContentSource) -> None:
        self._source = source
        self._pending: list[Background[BlockText]] = []

    def request(self, question: GetBlockText) -> None:
        """Read the contents on a thread. Never blocks."""
        self._pending.append(Background(partial(self._answer, question), "kvscope-contents"))

    def pop_replies(self) -> list[Reply]:
        """Return and remove the replies since the last call. A failed question has none."""
        if not self._pending:
            return []
        over = [work for work in self._pending if work.is_finished]
        self._pending = [work for work in self._pending if work not in over]
        return [work.result for work in over if work.result is not None]

    def _answer(self, question: GetBlockText, watch: ProgressCallback) -> BlockText:
        return BlockText(contents=tuple(self._source.contents(question.blocks)), tag=question.tag)
