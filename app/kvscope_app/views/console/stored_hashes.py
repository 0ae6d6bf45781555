"""Block hashes stored with answers, so that their blocks are known after a restart of the desktop. Imports no Qt.

Only the blocks after those of the previous answer are stored: a long chat would repeat its beginning in each answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvscope_app.views.console.block_chains import BlockChains, Hashes, num_equal_blocks
from kvscope_app.views.console.conversation import BlockHashes, Conversation, Message, omitted_keys


def to_stored(hashes: Hashes, earlier: Hashes | None) -> BlockHashes:
    """Return the stored form of `hashes`. `earlier` are those of the previous answer, None if they are unknown."""
    num_earlier = num_equal_blocks(hashes, earlier)
    return BlockHashes(num_earlier=num_earlier, own=hashes[num_earlier:].astype("<u8").tobytes())


def restore_hashes(conversation: Conversation, epoch: int, chains: BlockChains) -> None:
    """Add the hashes stored with answers that the engine with this epoch computed to `chains`, unless it has them."""
    for message in conversation.messages:
        stored, number = message.block_hashes, message.stats.number
        if stored is None or message.stats.epoch != epoch or chains.get(epoch, number) is not None:
            continue
        previous = previous_answer(conversation.path_to(message.key), message)
        earlier = None if previous is None else chains.get(previous.stats.epoch, previous.stats.number)
        num_known = 0 if earlier is None else earlier.size
        if num_known >= stored.num_earlier and len(stored.own) % 8 == 0:
            own = np.frombuffer(stored.own, "<u8").astype(np.uint64)
            before = own[:0] if earlier is None else earlier[: stored.num_earlier]
            chains.add_complete(epoch, number, np.concatenate([before, own]))


def previous_answer(path: Sequence[Message], answer: Message) -> Message | None:
    """Return the newest answer before `answer` that is part of its prompt."""
    before = path[: path.index(answer)]
    omitted = omitted_keys(before)
    return next((m for m in reversed(before) if m.stats.num_prompt_tokens and m.key not in omitted), None)
