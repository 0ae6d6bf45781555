"""Prompts to estimate: tokenized like submissions, then looked up in the prefix cache, and dropped."""

from __future__ import annotations

from collections.abc import Callable

from kvscope_engine.server.preparation import Prepared, TokenIdsOf
from kvscope_engine.server.served_engine import ServedEngine
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import EstimatePrompt, Reply, Submit, refuse


class PreparedEstimate(Prepared):
    """A prompt to estimate, while it is tokenized in its client's queue of submissions.

    `num_text_tokens` returns the number of tokens of a text; it is called on the tokenizing thread.
    """

    def __init__(self, client: bytes, command: EstimatePrompt, num_text_tokens: Callable[[str], int]) -> None:
        submit = Submit(
            request_id="estimate",
            messages=command.messages,
            cache_salt=command.cache_salt,
            tools=command.tools,
            adapter=command.adapter,
        )
        super().__init__(client, submit)
        self.command = command
        self._num_text_tokens = num_text_tokens
        self._num_draft_tokens = 0

    def tokenize(self, token_ids_of: TokenIdsOf, is_wanted: Callable[[], bool]) -> list[int]:
        token_ids = super().tokenize(token_ids_of, is_wanted)
        self._num_draft_tokens = self._num_text_tokens(self.command.messages[-1].content)
        return token_ids

    def answer(self, engine: ServedEngine) -> Reply:
        """Return the estimate, or the reason why there is none. Called on the engine's thread once tokenized."""
        try:
            token_ids = self.token_ids.result()
            return engine.estimate_prompt(self.submit, token_ids, self._num_draft_tokens, self.command.tag)
        except BadInput as error:
            return refuse(self.command, str(error))
