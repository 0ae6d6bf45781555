"""Decides which block texts must be requested for a recording, and which replies can be trusted.

Owns the record of which text of each block was recorded, and the pending requests. A reply describes the moment at
which it was created: it is accepted only once the ledger shows that the block has not changed since the request. Must
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
"""Partly filled blocks are requested only by every n-th call of `due`, because they will soon contain more tokens."""
_HOLDING: Final = np.array([BlockState.ACTIVE, BlockState.CACHED], np.uint8)

IdArray = npt.NDArray[np.uint32]


class TextCollector:
    """Selects blocks whose texts are missing, and checks the replies.

    Report changed ledger rows with `changed`, request the blocks that `due` returns, pass the replies to
    `add_contents`, and write the texts that `confirmed` returns.
    """

    def __init__(self) -> None:
        self.num_confirmed = 0
        """Number of texts confirmed since the current file began."""
        self._epoch: int | None = None
        self._dirty: list[IdArray] = []
        self._is_all_dirty = True
        self._next_row = 0
        self._owner = np.empty(0, np.int64)  # owner of the recorded text; -2: not recorded
        self._filled = np.empty(0, np.int64)
        self._hash = np.empty(0, np.uint64)
        self._asked: dict[int, tuple[int, int]] = {}  # block -> owner and hash when it was asked for
        self._answers: list[BlockContent] = []

    @property
    def is_waiting(self) -> bool:
        return bool(self._asked)

    def changed(self, ids: IdArray | None) -> None:
        """Mark rows of the ledger as changed; None marks all rows."""
        if ids is None:
            self._is_all_dirty = True
            self._dirty.clear()
        elif ids.size and not self._is_all_dirty:
            self._dirty.append(ids)

    def forget_written(self) -> None:
        """Forget what has been recorded, because a new file begins: all texts are due again."""
        self.num_confirmed = 0
        self._owner.fill(-2)
        self.changed(None)

    def forget_asked(self) -> None:
        """Drop the pending requests, because no reply is expected; their blocks become due again."""
        blocks = np.array(list(self._asked), np.uint32)
        self._asked.clear()
        self.changed(blocks)

    def due(self, ledger: Ledger, epoch: int, max_blocks: int) -> tuple[int, ...]:
        """Return at most `max_blocks` blocks to request now, and mark them as requested. Returns none while requests
        are pending.
        """
        self._track_changes(ledger, epoch)
        if self._asked:
            return ()
        self._next_row += 1
        ids = self._drain_dirty(ledger.num_blocks)
        ids = ids[
            ~np.isin(ledger.tier[ids], STATE_TIERS) | (ledger.hash[ids] != 0)
        ]  # a state without a hash has no text
        ids = ids[np.isin(ledger.state[ids], _HOLDING) & (ledger.filled[ids] > 0) & ~self._is_written(ledger, ids)]
        is_full = ledger.hash[ids] != 0
        wanted = ids if self._next_row % PARTIAL_EVERY == 0 else ids[is_full]
        later = ids[~is_full] if wanted is not ids else ids[:0]
        self.changed(np.concatenate((later, wanted[max_blocks:])))
        asked: list[int] = wanted[:max_blocks].tolist()
        self._asked = {block: (int(ledger.owner[block]), int(ledger.hash[block])) for block in asked}
        return tuple(asked)

    def add_contents(self, contents: Iterable[BlockContent]) -> None:
        """Add replies; those for blocks that were not requested are ignored."""
        self._answers += [content for content in contents if content.block in self._asked]

    def confirmed(self, ledger: Ledger, epoch: int) -> list[RecordedText]:
        """Return and clear the replies whose block still has the owner, and the hash if any, that it had when it was
        requested.
        """
        self._track_changes(ledger, epoch)
        answers, self._answers = self._answers, []
        texts = [text for content in answers if (text := self._is_consistent(ledger, epoch, content)) is not None]
        self.num_confirmed += len(texts)
        return texts

    def _is_consistent(self, ledger: Ledger, epoch: int, content: BlockContent) -> RecordedText | None:
        block = content.block
        asked = self._asked.pop(block, None)
        if asked is None:
            return None
        owner, block_hash = asked
        now = int(ledger.hash[block])
        if int(ledger.owner[block]) != owner or (now != block_hash and block_hash):
            self.changed(np.array([block], np.uint32))
            return None
        self._owner[block], self._filled[block], self._hash[block] = owner, len(content.token_ids), now
        if not content.token_ids:
            self._filled[block] = ledger.filled[block]
            return None
        is_state = ledger.tier[block] in STATE_TIERS  # the reply has the tokens of the block before the state
        is_whole = is_state or len(content.token_ids) == int(ledger.filled[block])
        if is_state:
            self._filled[block] = ledger.filled[block]
        if not is_whole:
            self.changed(np.array([block], np.uint32))
        return RecordedText(
            epoch=epoch,
            block=block,
            owner=owner,
            hash=hash_text(now if is_whole else block_hash),
            number=content.number,
            start=content.start,
            token_ids=content.token_ids,
            text=content.text,
            notes=content.notes,
        )

    def _track_changes(self, ledger: Ledger, epoch: int) -> None:
        if epoch == self._epoch and ledger.num_blocks == self._owner.size:
            return
        self._epoch = epoch
        self._owner = np.full(ledger.num_blocks, -2, np.int64)
        self._filled = np.zeros(ledger.num_blocks, np.int64)
        self._hash = np.zeros(ledger.num_blocks, np.uint64)
        self._asked.clear()
        self._answers.clear()
        self.changed(None)

    def _drain_dirty(self, num_rows: int) -> IdArray:
        dirty, self._dirty = self._dirty, []
        if self._is_all_dirty:
            self._is_all_dirty = False
            return np.arange(num_rows, dtype=np.uint32)
        ids = np.unique(np.concatenate(dirty)) if dirty else np.empty(0, np.uint32)
        return ids[ids < num_rows]

    def _is_written(self, ledger: Ledger, ids: IdArray) -> npt.NDArray[np.bool_]:
        same_owner = self._owner[ids] == ledger.owner[ids]
        same_tokens = (self._hash[ids] == ledger.hash[ids]) & (self._filled[ids] == ledger.filled[ids])
        same: npt.NDArray[np.bool_] = same_owner & same_tokens
        return same
