"""Index of all chat turns by the request that computed them."""

from __future__ import annotations

import time
from typing import Final

from kvscope_app.session.chat_turns import ChatTurn
from kvscope_app.views.console.chat import Chat
from kvscope_app.views.console.conversation import Conversation, Message

_MIN_INTERVAL_S: Final = 1.0
"""Minimum time between two scans of all messages, which take up to 20 ms. New turns are found this much later."""


class TurnIndex:
    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._answers: dict[tuple[int, int], tuple[Conversation, Message]] = {}
        self._is_outdated = True
        self._built_s = -_MIN_INTERVAL_S
        for signal in (chat.conversations_changed, chat.messages_changed, chat.answer_changed):
            signal.connect(self._set_outdated)

    def find(self, epoch: int, number: int) -> ChatTurn | None:
        """Return the turn of request `number` of the engine start `epoch`, or None."""
        now_s = time.monotonic()
        if self._is_outdated and now_s - self._built_s >= _MIN_INTERVAL_S:
            self._is_outdated, self._built_s = False, now_s
            self._answers = {
                (message.stats.epoch, message.stats.number): (conversation, message)
                for conversation in self._chat.conversations
                for message in conversation.messages
                if message.stats.number
            }
        if (found := self._answers.get((epoch, number))) is None:
            return None
        conversation, answer = found
        turn_number = sum(message.role == "user" for message in conversation.path_to(answer.key))
        return ChatTurn(conversation.key, answer.key, conversation.title, turn_number)

    def _set_outdated(self, *_: object) -> None:
        self._is_outdated = True
