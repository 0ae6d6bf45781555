"""Decides which block texts must be requested for a recording, and which replies can be trusted.

Owns the record of which text of each block was recorded, and the pending requests. A reply describes the moment at
which it was created: it is accepted only when the ledger shows that the block has not changed since the request. Must
not depend on the engine or the writer. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from kvscope_telemetry.block_texts.block_texts import RecordedText, hash_text
from kvscope_telemetry.ledger import STATE_TIERS, BlockState, Ledger
from kvscope_telemetry.messages.commands import BlockContent

PARTIAL_EVERY: Final = 4
"""Texts of partly filled blocks are requested only in every n-th call of `due`, because these blocks will soon
contain more tokens.
"""
_STATES_WITH_TEXT: Final = np.array([BlockState.ACTIVE, BlockState.CACHED], np.uint8)

IdArray = npt.NDArray[np.uint32]


class TextCollector:
    """Selects blocks whose texts are missing, and checks the replies.

    Report changed ledger rows with `mark_changed`, request the blocks that `due` returns, pass the replies to
    `add_contents`, and write the texts that `confirmed` returns.
    """

    def __init__(self) -> None:
        self.num_confirmed = 0
        self._epoch: int | None = None
        self._dirty: list[IdArray] = []
        self._is_all_dirty = True
        self._num_turns = 0
        self._owner = np.empty(0, np.int64)  # owner of the recorded text; -2: not recorded
        self._filled = np.empty(0, np.int64)
        self._hash = np.empty(0, np.uint64)
        self._pending: dict[int, tuple[int, int]] = {}  # block -> owner and hash when it was asked for
        self._replies: list[BlockContent] = []

    @property
    def is_waiting(self) -> bool:
        return bool(self._pending)

    def mark_changed(self, ids: IdArray | None) -> None:
        """Mark rows of the ledger as changed; None marks all rows."""
        if ids is None:
            self._is_all_dirty = True
            self._dirty.clear()
        elif ids.size and not self._is_all_dirty:
            self._dirty.append(ids)

    def forget_written(self) -> None:
        """Reset which texts have been recorded, because a new file begins: all texts are due again."""
        self.num_confirmed = 0
        self._owner.fill(-2)
        self.mark_changed(None)

    def drop_pending(self) -> None:
        """Drop the pending requests, because no reply is expected; their blocks become due again."""
        blocks = np.array(list(self._pending), np.uint32)
        self._pending.clear()
        self.mark_changed(blocks)

    def due(self, ledger: Ledger, epoch: int, max_blocks: int) -> tuple[int, ...]:
        """Return at most `max_blocks` blocks whose text is to be requested now, and mark them as requested.
        Returns none while requests are pending.
        """
        self._reset_if_replaced(ledger, epoch)
        if self._pending:
            return ()
        self._num_turns += 1
        ids = self._drain_dirty(ledger.num_blocks)
        ids = ids[
            ~np.isin(ledger.tier[ids], STATE_TIERS) | (ledger.hash[ids] != 0)
        ]  # a state without a hash has no text
        ids = ids[
            np.isin(ledger.state[ids], _STATES_WITH_TEXT) & (ledger.filled[ids] > 0) & ~self._is_recorded(ledger, ids)
        ]
        is_full = ledger.hash[ids] != 0
        wanted = ids if self._num_turns % PARTIAL_EVERY == 0 else ids[is_full]
        postponed = ids[~is_full] if wanted is not ids else ids[:0]
        self.mark_changed(np.concatenate((postponed, wanted[max_blocks:])))
        requested: list[int] = wanted[:max_blocks].tolist()
        self._pending = {block: (int(ledger.owner[block]), int(ledger.hash[block])) for block in requested}
        return tuple(requested)

    def add_contents(self, contents: Iterable[BlockContent]) -> None:
        """Add replies. Those for blocks that were not requested are ignored."""
        self._replies += [content for content in contents if content.block in self._pending]

    def confirmed(self, ledger: Ledger, epoch: int) -> list[RecordedText]:
        """Return and clear the replies that are still valid: the block has the same owner as when its text was
        requested, and the same hash if it had one.
        """
        self._reset_if_replaced(ledger, epoch)
        replies, self._replies = self._replies, []
        texts = [text for content in replies if (text := self._confirmed_text(ledger, epoch, content)) is not None]
        self.num_confirmed += len(texts)
        return texts

    def _confirmed_text(self, ledger: Ledger, epoch: int, content: BlockContent) -> RecordedText | None:
        block = content.block
        request = self._pending.pop(block, None)
        if request is None:
            return None
        owner, block_hash = request
        current_hash = int(ledger.hash[block])
        if int(ledger.owner[block]) != owner or (current_hash != block_hash and block_hash):
            self.mark_changed(np.array([block], np.uint32))
            return None
        self._owner[block], self._filled[block], self._hash[block] = owner, len(content.token_ids), current_hash
        if not content.token_ids:
            self._filled[block] = ledger.filled[block]
            return None
        is_state = ledger.tier[block] in STATE_TIERS  # the reply has the tokens of the block before the state
        is_whole = is_state or len(content.token_ids) == int(ledger.filled[block])
        if is_state:
            self._filled[block] = ledger.filled[block]
        if not is_whole:
            self.mark_changed(np.array([block], np.uint32))
        return RecordedText(
            epoch=epoch,
            block=block,
            owner=owner,
            hash=hash_text(current_hash if is_whole else block_hash),
            number=content.number,
            start=content.start,
            token_ids=content.token_ids,
            text=content.text,
            notes=content.notes,
        )

    def _reset_if_replaced(self, ledger: Ledger, epoch: int) -> None:
        if epoch == self._epoch and ledger.num_blocks == self._owner.size:
            return
        self._epoch = epoch
        self._owner = np.full(ledger.num_blocks, -2, np.int64)
        self._filled = np.zeros(ledger.num_blocks, np.int64)
        self._hash = np.zeros(ledger.num_blocks, np.uint64)
        self._pending.clear()
        self._replies.clear()
        self.mark_changed(None)

    def _drain_dirty(self, num_rows: int) -> IdArray:
        dirty, self._dirty = self._dirty, []
        if self._is_all_dirty:
            self._is_all_dirty = False
            return np.arange(num_rows, dtype=np.uint32)
        ids = np.unique(np.concatenate(dirty)) if dirty else np.empty(0, np.uint32)
        return ids[ids < num_rows]

    def _is_recorded(self, ledger: Ledger, ids: IdArray) -> npt.NDArray[np.bool_]:
        same_owner = self._owner[ids] == ledger.owner[ids]
        same_tokens = (self._hash[ids] == ledger.hash[ids]) & (self._filled[ids] == ledger.filled[ids])
        same: npt.NDArray[np.bool_] = same_owner & same_tokens
        return same
