"""The text of blocks by their hashes: asked of the engine for what is looked at, some blocks at once, and kept.

A hash names a text for as long as an engine runs, so what is kept stays true where the block is gone, and away from the
end. Asked is only while the row at the engine has the hash that is shown.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from PySide6.QtCore import QObject, QTimer, Signal

from kvscope_app.session.session import Session
from kvscope_telemetry.messages.commands import BlockText, Failed, GetBlockText, Reply

MAX_KEPT: Final = 8192
MAX_ASKED: Final = 128
ASK_EVERY_MS: Final = 80
GIVE_UP_MS: Final = 2000
_FIRST_TAG: Final = 1 << 42
"""Tags of ours are above those of other askers on the same socket."""


class NodeTexts(QObject):
    """Cache of texts by (epoch, hash)."""

    arrived = Signal()

    def __init__(self, session: Session, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._session = session
        self._kept: OrderedDict[tuple[int, int], tuple[str, int]] = OrderedDict()
        self._wanted: dict[int, int] = {}  # hash -> row, the newest last
        self._asked: list[tuple[int, int, int]] = []  # epoch, hash, row
        self._tag = _FIRST_TAG
        self._soon = QTimer(self, singleShot=True, interval=ASK_EVERY_MS)
        self._soon.timeout.connect(self._ask)
        self._give_up = QTimer(self, singleShot=True, interval=GIVE_UP_MS)
        self._give_up.timeout.connect(self._forget_question)
        session.replies.connect(self._take)

    def get(self, block_hash: int) -> str | None:
        """The text, None where it is not known."""
        kept = self._kept.get((self._session.mirror.epoch or 0, block_hash))
        return None if kept is None else kept[0]

    def want(self, blocks: Iterable[tuple[int, int]]) -> None:
        """Ask for the texts of (hash, row) that are not here; `arrived` tells. Replaces what was wanted before."""
        epoch = self._session.mirror.epoch or 0
        self._wanted = {h: row for h, row in blocks if (epoch, h) not in self._kept and self._is_there(h, row)}
        if self._wanted and not self._asked and not self._soon.isActive():
            self._soon.start()

    def containing(self, words: str) -> dict[int, int]:
        """Rows and hashes of the blocks with `words` in them, whatever their case, as far as texts are known."""
        epoch, needle = self._session.mirror.epoch or 0, words.casefold()
        return {row: h for (of, h), (text, row) in self._kept.items() if of == epoch and needle in text.casefold()}

    def _is_there(self, block_hash: int, row: int) -> bool:
        """Whether the engine would tell, and of this text."""
        live = self._session.live_mirror
        if not self._session.may_operate or live.epoch != self._session.mirror.epoch:
            return False
        return row < live.num_rows and int(live.ledger.hash[row]) == block_hash

    def _ask(self) -> None:
        wanted = [(h, row) for h, row in self._wanted.items() if self._is_there(h, row)][:MAX_ASKED]
        self._wanted = {}
        if not wanted or self._asked:
            return
        epoch = self._session.mirror.epoch or 0
        self._tag += 1
        if self._session.send(GetBlockText(blocks=tuple(row for _, row in wanted), tag=self._tag)):
            self._asked = [(epoch, h, row) for h, row in wanted]
            self._give_up.start()

    def _take(self, replies: list[Reply]) -> None:
        for reply in replies:
            if isinstance(reply, BlockText | Failed) and reply.tag == self._tag and self._asked:
                asked = self._asked
                self._forget_question()
                if isinstance(reply, BlockText):
                    self._keep(asked, reply)

    def _keep(self, asked: list[tuple[int, int, int]], reply: BlockText) -> None:
        live = self._session.live_mirror
        for (epoch, block_hash, row), content in zip(asked, reply.contents, strict=False):
            is_same = live.epoch == epoch and row < live.num_rows and int(live.ledger.hash[row]) == block_hash
            if is_same and content.block == row and content.token_ids:
                self._kept[epoch, block_hash] = (content.text or " ".join(map(str, content.token_ids)), row)
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        self.arrived.emit()

    def _forget_question(self) -> None:
        self._asked = []
        self._give_up.stop()
        if self._wanted:
            self._soon.start()
