"""A question for the contents of blocks, answered a slice at a time, so that four thousand blocks hold up nobody."""

from __future__ import annotations

from typing import Final

from kvscope_engine.server.served_engine import ServedEngine
from kvscope_telemetry.messages.commands import BlockContent, BlockText, GetBlockText

SLICE_BLOCKS: Final = 32


class BlockTextQuery:
    """What is asked, and what was found so far. Each block is told as it was when its slice was read."""

    def __init__(self, command: GetBlockText) -> None:
        self.command = command
        self._contents: list[BlockContent] = []

    def advance(self, engine: ServedEngine) -> BlockText | None:
        """Read a slice; the answer when it was the last."""
        start = len(self._contents)
        self._contents += engine.block_text(self.command.blocks[start : start + SLICE_BLOCKS])
        if len(self._contents) < len(self.command.blocks):
            return None
        return BlockText(contents=tuple(self._contents), tag=self.command.tag)
