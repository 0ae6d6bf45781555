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
from kvscope_telemetry.state.mirror import Mirror
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


def stamp_of(mirror: Mirror, block: int) -> Stamp:
    """Of a block, 0 <= block < mirror.num_rows."""
    ledger = mirror.ledger
    return Stamp(mirror.epoch or 0, int(ledger.owner[block]), int(ledger.filled[block]), int(ledger.hash[block]))


class BlockTexts(QObject):
    """Cache of block contents by block and stamp."""

    arrived = Signal(int)
    """The content of this block is there now."""

    def __init__(self, session: Session, parent: QObject | None = None, first_tag: int = _FIRST_TAG) -> None:
        """`first_tag`: who asks beside others on the same session has tags of its own."""
        super().__init__(parent)
        self._session = session
        self._kept: OrderedDict[tuple[int, Stamp], BlockContent] = OrderedDict()
        self._asked: tuple[int, Stamp] | None = None
        self._wanted: tuple[int, Stamp] | None = None
        self._looking: Background[BlockContent] | None = None
        self._tag = 0
        self._tags = itertools.count(first_tag)
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
        if key != self._asked and self.may_ask(block, stamp):
            self._wanted = key
            if not self._timer.isActive() and self._asked is None:
                self._timer.start()
        return None

    def may_ask(self, block: int, stamp: Stamp) -> bool:
        """Whether somebody can tell: the engine, of a block that is so now; of another time, what was recorded."""
        return self._is_live(block, stamp) or self._session.recorded_texts is not None

    def _is_live(self, block: int, stamp: Stamp) -> bool:
        """Whether there is an engine that may be asked, and the block there is still what is shown: away from the end
        it may hold another's text."""
        live = self._session.live_mirror
        if not self._session.may_operate:
            return False
        return live is self._session.mirror or (block < live.num_rows and stamp_of(live, block) == stamp)

    def _ask(self) -> None:
        if self._looking is not None:
            self._look(self._looking)
            return
        if self._wanted is None or self._asked is not None:
            return
        self._asked, self._wanted = self._wanted, None
        recorded = None if self._is_live(*self._asked) else self._session.recorded_texts
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
