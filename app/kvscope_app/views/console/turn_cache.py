"""Connects the shown conversation with the KV cache: strips of blocks, prefix marks, and the comparison of versions.

Records the block hashes of all answers while they are written. Refreshes the shown cards at most once per second, and
only while they are visible and something has changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from PySide6.QtCore import QObject, QTimer, Signal

from kvscope_app.session.session import Session
from kvscope_app.session.session_selection import BlockComparison
from kvscope_app.views.console.block_chains import BlockChains, Hashes, HashIndex, tree_group
from kvscope_app.views.console.chat import Chat
from kvscope_app.views.console.conversation import AnswerStats, Conversation, Message
from kvscope_app.views.console.message_card import MessageCard
from kvscope_app.views.console.prefix_break import PrefixBreak, TurnRequest, edit_offset, find_break
from kvscope_app.views.console.stored_hashes import previous_answer, restore_hashes, to_stored
from kvscope_app.views.console.transcript import Transcript
from kvscope_app.views.console.turn_blocks import TurnBlocks, no_blocks, turn_blocks, why_unknown
from kvscope_app.views.visibility import is_on_screen
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import EventData
from kvscope_telemetry.mirror.mirror import Mirror

REFRESH_MS: Final = 1000


class TurnCache(QObject):
    notified = Signal(str)
    """Emitted with a sentence for the user, such as the reason why two versions cannot be compared."""

    def __init__(self, session: Session, chat: Chat, transcript: Transcript, parent: QObject) -> None:
        super().__init__(parent)
        self._session, self._chat, self._transcript = session, chat, transcript
        self._chains = BlockChains()
        self._unrecorded: dict[tuple[int, int], tuple[Conversation, Message]] = {}
        """Answer of each request whose blocks are not completely recorded yet, by epoch and number of the request."""
        self._restored: tuple[str, int | None] = ("", None)
        """Conversation and epoch for which stored hashes were restored."""
        self._conversation: Conversation | None = None
        self._shown_state: tuple[object, ...] = ()
        self._blocks: dict[str, TurnBlocks] = {}
        """Blocks shown in the strip of each answer, by the answer's key."""
        self._selected_answer = ""
        """Key of the answer whose blocks were selected by a click on its strip."""
        self._compared: tuple[str, BlockComparison] | None = None
        """Key of the message whose versions are compared, with the comparison in the selection."""
        transcript.block_chosen.connect(self._on_block)
        transcript.comparison_requested.connect(self._on_comparison)
        session.selection.changed.connect(self._on_selection)
        chat.answer_changed.connect(self._on_answer_changed)
        self._timer = QTimer(self, interval=REFRESH_MS)
        self._timer.timeout.connect(self.refresh)
        self._timer.start()

    def show_conversation(self, conversation: Conversation) -> None:
        """Show the blocks of this conversation's answers. Call it after its cards have changed."""
        self._conversation = conversation
        self._shown_state = ()
        self.refresh()
        self._on_selection()

    def refresh(self) -> None:
        self._record()
        mirror, conversation = self._session.mirror, self._conversation
        if conversation is None or not is_on_screen(self._transcript):
            return
        endings = tuple((card.message.ending, card.message.stats) for card in self._transcript.cards)
        state = (mirror, mirror.epoch, mirror.version, len(self._unrecorded), endings)
        if state != self._shown_state:
            self._shown_state = state
            self._show(mirror, conversation)

    def _record(self) -> None:
        mirror = self._session.live_mirror
        if self._conversation is not None:
            if self._restored != (self._conversation.key, mirror.epoch) and mirror.epoch is not None:
                self._restored = (self._conversation.key, mirror.epoch)
                restore_hashes(self._conversation, mirror.epoch, self._chains)
            for card in self._transcript.cards:
                self._add_unrecorded(self._conversation, card.message)
        for key, (conversation, answer) in list(self._unrecorded.items()):
            epoch, number = key
            row = mirror.requests.row_of(number) if epoch == mirror.epoch else None
            if row is not None:
                self._chains.record(mirror, number)
            if row is None or mirror.requests.state[row] == RequestState.FINISHED:
                del self._unrecorded[key]
                self._store(conversation, answer)

    def _store(self, conversation: Conversation, answer: Message) -> None:
        hashes = self._hashes_of(answer)
        if hashes is not None and answer.block_hashes is None and answer in conversation.messages:
            previous = previous_answer(conversation.path_to(answer.key), answer)
            earlier = None if previous is None else self._hashes_of(previous)
            self._chat.store_blocks(conversation, answer, to_stored(hashes, earlier))

    def _on_answer_changed(self, key: str) -> None:
        for answer in self._chat.answers_of(key):
            self._add_unrecorded(answer.conversation, answer.message)

    def _add_unrecorded(self, conversation: Conversation, answer: Message) -> None:
        mirror, stats = self._session.live_mirror, answer.stats
        is_known = stats.number and stats.epoch == mirror.epoch and mirror.requests.row_of(stats.number) is not None
        if is_known and not self._chains.is_complete(stats.epoch, stats.number):
            self._unrecorded[stats.epoch, stats.number] = (conversation, answer)

    def _show(self, mirror: Mirror, conversation: Conversation) -> None:
        answers = [card.message for card in self._transcript.cards if card.message.role == "assistant"]
        chains = [self._chains.get(answer.stats.epoch, answer.stats.number) for answer in answers]
        index = HashIndex(mirror, [chain for chain in chains if chain is not None])
        shown_path = conversation.path
        breaks: dict[str, PrefixBreak] = {}
        for card in self._transcript.cards:
            if card.message.role == "assistant":
                path = shown_path if card.message in shown_path else conversation.path_to(card.message.key)
                previous = previous_answer(path, card.message)
                self._show_blocks(card, mirror, index, previous)
                breaks |= self._break_of(card.message, path, previous, conversation)
        self._show_reasons_once()
        for card in self._transcript.cards:
            card.prefix_mark.show_break(breaks.get(card.message.key))
        self._update_selected_rows()

    def _show_blocks(self, card: MessageCard, mirror: Mirror, index: HashIndex, previous: Message | None) -> None:
        stats = card.message.stats
        if mirror.hello is None:
            blocks = no_blocks("")  # a line on each card would only repeat that the model is loading
        elif not card.message.ending and self._session.live_mirror.requests.row_of(stats.number) is None:
            blocks = no_blocks("")  # the engine has not reported its request yet
        elif not stats.number and not stats.num_prompt_tokens:
            blocks = no_blocks("")  # not accepted, so that there was no request
        else:
            is_live = mirror is self._session.live_mirror
            before = None if previous is None else previous.stats
            blocks = turn_blocks(mirror, stats, self._chains, index, before, is_live=is_live)
        self._blocks[card.message.key] = blocks

    def _show_reasons_once(self) -> None:
        """Show the blocks on each card, and each reason why blocks are unknown only on the last card that has it."""
        shown: set[str] = set()
        for card in reversed(self._transcript.cards):
            if (blocks := self._blocks.get(card.message.key)) is not None:
                is_repeated = bool(blocks.reason) and blocks.reason in shown
                card.cache.show_blocks(no_blocks("") if is_repeated else blocks)
                shown.add(blocks.reason)

    def _break_of(
        self, answer: Message, path: Sequence[Message], previous: Message | None, conversation: Conversation
    ) -> dict[str, PrefixBreak]:
        """Return where the prefix of the answer's prompt ended, by the key of the message whose card shows it.

        Empty for further answers that were requested together, which share the first one's blocks.
        """
        mirror, stats = self._session.live_mirror, answer.stats
        position = path.index(answer)
        is_further = conversation.batch_of(answer)[0] is not answer
        if (
            not position
            or is_further
            or why_unknown(mirror, stats)
            or mirror.hello is None
            or not mirror.hello.cache.prefix_caching
        ):
            return {}
        row = mirror.requests.row_of(stats.number)
        if row is None or mirror.requests.state[row] == RequestState.WAITING:
            return {}
        prompt = path[position - 1]
        turn = TurnRequest(
            answer, int(mirror.requests.num_cached_tokens[row]), self._hashes_of(answer), self._miss_of(stats)
        )
        before = None if previous is None else TurnRequest(previous, hashes=self._hashes_of(previous))
        block_size = mirror.hello.cache.block_sizes[tree_group(mirror.hello.cache)]
        found = find_break(turn, before, block_size, prompt, _earlier_version(conversation, prompt, answer))
        if found is None:
            return {}
        return {(answer if found.offset is None else prompt).key: found}

    def _hashes_of(self, answer: Message) -> Hashes | None:
        return self._chains.get(answer.stats.epoch, answer.stats.number)

    def _miss_of(self, stats: AnswerStats) -> EventData | None:
        """Return the data of the event of the request's admission, None if the event is unknown or has none."""
        events = self._session.history.events.of_request(stats.epoch, stats.number)
        admitted = (entry.event for entry in events if entry.event.kind == "admitted")
        return next((event.data for event in admitted if event.number == stats.number), None)

    def _on_block(self, answer: Message, index: int) -> None:
        blocks = self._blocks.get(answer.key)
        if blocks is None or index >= blocks.rows.size:
            return
        self._selected_answer = ""
        self._session.selection.highlight_rows(blocks.own_rows)
        self._selected_answer = answer.key
        row = int(blocks.rows[index])
        self._session.selection.select_block(row if row >= 0 else None)

    def _update_selected_rows(self) -> None:
        """Highlight the rows that the selected turn's blocks have now."""
        blocks = self._blocks.get(self._selected_answer)
        if blocks is not None:
            answer, self._selected_answer = self._selected_answer, ""
            self._session.selection.highlight_rows(blocks.own_rows)
            self._selected_answer = answer

    def _on_comparison(self, message: Message, other: Message | None) -> None:
        if other is None or self._conversation is None:
            self._session.selection.compare(None)
            return
        sides = []
        versions = self._conversation.versions(message)
        for version in (message, other):
            label = f"version {versions.index(version) + 1}"
            answer = self._answer_of(version)
            hashes = None if answer is None else self._hashes_of(answer)
            if answer is None or hashes is None or answer.stats.epoch != self._session.live_mirror.epoch:
                why = "" if answer is None else why_unknown(self._session.live_mirror, answer.stats)
                self.notified.emit(why or f"The blocks of {label} are unknown: they were not observed.")
                self._on_selection()
                return
            sides.append((hashes[hashes != 0], label))
        (first, first_label), (second, second_label) = sides
        comparison = BlockComparison(first, second, first_label, second_label)
        self._compared = (message.key, comparison)
        self._session.selection.compare(comparison)
        self._session.selection.select_block(None)

    def _answer_of(self, version: Message) -> Message | None:
        """Return the answer whose request has the blocks of `version`: itself, or the newest answer to this prompt."""
        assert self._conversation is not None, "it has versions"
        if version.role == "assistant":
            return version
        answers = [message for message in self._conversation.messages if message.parent == version.key]
        return next((answer for answer in reversed(answers) if answer.stats.number), None)

    def _on_selection(self) -> None:
        """Show which comparison is active, and forget a selection that was replaced elsewhere."""
        selection = self._session.selection
        if self._compared is not None and selection.comparison is not self._compared[1]:
            self._compared = None
        for card in self._transcript.cards:
            is_active = self._compared is not None and self._compared[0] == card.message.key
            card.versions.show_comparison(is_active=is_active)
        blocks = self._blocks.get(self._selected_answer)
        rows = selection.highlighted_rows
        if blocks is not None and (rows is None or not np.array_equal(rows, blocks.own_rows)):
            self._selected_answer = ""


def _earlier_version(conversation: Conversation, prompt: Message, answer: Message) -> Message | None:
    """Return the earlier version of `prompt` with the longest equal beginning that the same engine has received.

    Returns None if the engine had received `prompt` itself before, because `answer` was regenerated.
    """
    sent: list[str] = []
    for message in conversation.messages:
        if message is answer:
            break
        if message.stats.number and message.stats.epoch == answer.stats.epoch:
            sent.append(message.parent)
    if prompt.key in sent:
        return None
    versions = [version for version in conversation.versions(prompt) if version.key in sent]
    return max(versions, key=lambda version: edit_offset(prompt, version) or 0, default=None)
