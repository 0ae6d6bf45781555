"""What text blocks hold: asked when a person looks, kept a while, never asked twice at once.

The engine is asked for what a block holds now; of another time only what was recorded can tell, where it has texts.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from PySide6.QtCore import QObject, QTimer, Signal

from kvscope_app.session.background import Background
from kvscope_app.session.session import Session
from kvscope_telemetry.messages.commands import BlockContent, BlockText, GetBlockText, Reply
from kvscope_telemetry.texts.block_texts import Asked

MAX_KEPT: Final = 512
ASK_EVERY_MS: Final = 60
GIVE_UP_MS: Final = 2000
_FIRST_TAG: Final = 1 << 40
"""Tags of ours are above those of other askers on the same socket."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """When this differs, the block's content may too."""

    epoch: int
    owner: int
    filled: int
    hash: int


class BlockTexts(QObject):
    """Cache of block contents by block and stamp."""

    arrived = Signal(int)
    """The content of this block is there now."""

    def __init__(self, session: Session, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._session = session
        self._kept: OrderedDict[tuple[int, Stamp], BlockContent] = OrderedDict()
        self._asked: tuple[int, Stamp] | None = None
        self._wanted: tuple[int, Stamp] | None = None
        self._looking: Background[BlockContent] | None = None
        self._tag = 0
        self._tags = itertools.count(_FIRST_TAG)
        self._timer = QTimer(self, singleShot=True, interval=ASK_EVERY_MS)
        self._timer.timeout.connect(self._ask)
        self._give_up = QTimer(self, singleShot=True, interval=GIVE_UP_MS)
        self._give_up.timeout.connect(self._forget_question)
        session.replies.connect(self._take)

    def get(self, block: int, stamp: Stamp) -> BlockContent | None:
        """The content if it is here; otherwise it is asked for and `arrived` tells."""
        key = (block, stamp)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        if key != self._asked and self._can_be_told(key):
            self._wanted = key
            if not self._timer.isActive() and self._asked is None:
                self._timer.start()
        return None

    def is_waiting(self, block: int, stamp: Stamp) -> bool:
        """Whether that was asked for, or soon will be."""
        return (block, stamp) in (self._asked, self._wanted)

    def _can_be_told(self, key: tuple[int, Stamp]) -> bool:
        if self._is_present(key):
            return self._session.may_operate
        return self._session.recorded_texts is not None

    def _is_present(self, key: tuple[int, Stamp]) -> bool:
        """Whether the block is so now, at the other end."""
        mirror, (block, stamp) = self._session.live_mirror, key
        if self._session.is_file or mirror.epoch != stamp.epoch or block >= mirror.ledger.num_blocks:
            return False
        row = (mirror.ledger.owner[block], mirror.ledger.filled[block], mirror.ledger.hash[block])
        is_live = self._session.mirror is mirror  # a block that fills is another by the time it is asked for
        return is_live or tuple(int(value) for value in row) == (stamp.owner, stamp.filled, stamp.hash)

    def _ask(self) -> None:
        if self._looking is not None:
            self._look(self._looking)
            return
        if self._wanted is None or self._asked is not None:
            return
        self._asked, self._wanted = self._wanted, None
        recorded = None if self._is_present(self._asked) else self._session.recorded_texts
        if recorded is not None:
            block, stamp = self._asked
            asked = Asked(stamp.epoch, block, stamp.owner, stamp.filled, stamp.hash)
            self._looking = recorded.look_up(asked, self._session.cursor_ns)
            self._timer.start()
            return
        self._tag = next(self._tags)
        self._session.send(GetBlockText(blocks=(self._asked[0],), tag=self._tag))
        self._give_up.start()

    def _look(self, looking: Background[BlockContent]) -> None:
        """Whether the recording was read meanwhile."""
        if not looking.is_over:
            self._timer.start()
            return
        self._looking = None
        if self._asked is not None and looking.made is not None:
            self._keep(self._asked, looking.made)
        else:
            self._forget_question()

    def _take(self, replies: list[Reply]) -> None:
        for reply in replies:
            if isinstance(reply, BlockText) and reply.tag == self._tag and self._asked is not None:
                self._keep(self._asked, reply.contents[0] if reply.contents else BlockContent(block=self._asked[0]))

    def _keep(self, key: tuple[int, Stamp], content: BlockContent) -> None:
        self._kept[key] = content
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        self._forget_question()
        self.arrived.emit(key[0])

    def _forget_question(self) -> None:
        self._asked = None
        self._give_up.stop()
        if self._wanted is not None:
            self._timer.start()
