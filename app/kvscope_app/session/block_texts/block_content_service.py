"""Answers requests for block contents from a source that has the contents, such as a recording. Imports no Qt.

Owns the reading threads, because the first reply may have to load a tokenizer.
"""

from __future__ import annotations

from functools import partial

from kvscope_app.session.background import Background
from kvscope_app.session.links import BlockContentSource
from kvscope_telemetry.messages.commands import BlockText, GetBlockText, Reply
from kvscope_telemetry.recordings.read_budget import ProgressCallback


class BlockContentService:
    """Answers `GetBlockText` requests from `source` on threads, one per request. `pop_replies` returns the replies."""

    def __init__(self, source: BlockContentSource) -> None:
        self._source = source
        self._pending: list[Background[BlockText]] = []

    def request(self, question: GetBlockText) -> None:
        self._pending.append(Background(partial(self._answer, question), "kvscope-contents"))

    def pop_replies(self) -> list[Reply]:
        """Return and remove the replies since the last call. A failed request has no reply."""
        if not self._pending:
            return []
        finished = [work for work in self._pending if work.is_finished]
        self._pending = [work for work in self._pending if work not in finished]
        return [work.result for work in finished if work.result is not None]

    def _answer(self, question: GetBlockText, watch: ProgressCallback) -> BlockText:
        return BlockText(contents=tuple(self._source.contents(question.blocks)), tag=question.tag)
