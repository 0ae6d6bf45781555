"""Prompts that are returned with their completions: as text (`echo`), and as log-probabilities of their tokens.

Evaluation tools such as lm-evaluation-harness score given answers in this way.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from kvscope_engine.http.schemas.logprobs import echoed_logprobs, prompt_logprobs, token_texts
from kvscope_engine.http.schemas.responses import CompletionLogprobs, PromptLogprobs
from kvscope_engine.tokenization.tokenizer import Tokenizer
from kvscope_telemetry.messages.commands import TokenLogprobs, Tokens


class PromptScores:
    """Log-probabilities of the tokens of one prompt, as the engine sends them."""

    def __init__(self, tokenizer: Tokenizer | None, *, are_returned: bool) -> None:
        self._tokenizer = tokenizer
        self._are_returned = are_returned
        self.entries: list[TokenLogprobs] = []
        self.texts: list[Sequence[str]] = []

    def add(self, reply: Tokens) -> None:
        self.entries += reply.prompt_logprobs
        self.texts += token_texts(reply.prompt_logprobs, reply.prompt_logprob_texts, self._tokenizer)

    @property
    def as_vllm(self) -> PromptLogprobs | UnsetType:
        """The field `prompt_logprobs` of the response; UNSET unless the client asked for it."""
        return prompt_logprobs(self.entries, self.texts) if self._are_returned else UNSET


class PromptEcho:
    """A prompt to return before its completions.

    Args:
        text: The prompt's text.
        token_ids: The prompt's tokens.
        num_top: Number of most likely tokens in the log-probabilities; None without log-probabilities.
    """

    def __init__(self, text: str, token_ids: Sequence[int], num_top: int | None) -> None:
        self.text = text
        self._token_ids = token_ids
        self._num_top = num_top

    def logprobs(self, scores: PromptScores, tokenizer: Tokenizer) -> CompletionLogprobs | None:
        if self._num_top is None:
            return None
        entries = [replace(entry, top=entry.top[: self._num_top]) for entry in scores.entries]
        texts = [one[: 1 + self._num_top] for one in scores.texts]
        return echoed_logprobs(self._token_ids, entries, texts, tokenizer)
