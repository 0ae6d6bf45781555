"""Converts log-probabilities to OpenAI's two formats, with the text of the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from kvscope_engine.http.schemas.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from kvscope_engine.tokenization.tokenizer import Tokenizer
from kvscope_telemetry.messages.commands import TokenLogprobs, Tokens


def chat_logprobs(tokens: Tokens, tokenizer: Tokenizer | None) -> ChatLogprobs | None:
    if not tokens.logprobs:
        return None
    texts = token_texts(tokens.logprobs, tokens.logprob_texts, tokenizer)
    return ChatLogprobs([_chat_entry(entry, one) for entry, one in zip(tokens.logprobs, texts, strict=True)])


def completion_logprobs(tokens: Tokens, tokenizer: Tokenizer | None, offset: int) -> CompletionLogprobs | None:
    """Return the log-probabilities of a completion's new tokens; None if they were not requested.

    `offset`: character index in the completion's text at which the first new token begins.
    """
    if not tokens.logprobs:
        return None
    texts = token_texts(tokens.logprobs, tokens.logprob_texts, tokenizer)
    offsets = []
    for position_texts in texts:
        offsets.append(offset)
        offset += len(position_texts[0])
    return CompletionLogprobs(
        tokens=[position_texts[0] for position_texts in texts],
        token_logprobs=[_finite(entry.logprob) for entry in tokens.logprobs],
        top_logprobs=[
            _top(entry, position_texts) for entry, position_texts in zip(tokens.logprobs, texts, strict=True)
        ],
        text_offset=offsets,
    )


def echoed_logprobs(
    prompt_token_ids: Sequence[int],
    scores: Sequence[TokenLogprobs],
    texts: Sequence[Sequence[str]],
    tokenizer: Tokenizer,
) -> CompletionLogprobs:
    """Return the log-probabilities of an echoed prompt.

    `scores` and `texts` are those of `Tokens.prompt_logprobs`, which start at the second token.
    """
    first = tokenizer.token_text(prompt_token_ids[0])
    tokens = [first, *(position_texts[0] for position_texts in texts)]
    return CompletionLogprobs(
        tokens=tokens,
        token_logprobs=[None, *(_finite(entry.logprob) for entry in scores)],
        top_logprobs=[None, *(_top(entry, one) for entry, one in zip(scores, texts, strict=True))],
        text_offset=list(accumulate(map(len, tokens[:-1]), initial=0)),
    )


def prompt_logprobs(scores: Sequence[TokenLogprobs], texts: Sequence[Sequence[str]]) -> PromptLogprobs:
    """Return the log-probabilities of a prompt in vLLM's format, which lists the prompt's token first."""
    positions: PromptLogprobs = [None]
    for entry, (own_text, *top_texts) in zip(scores, texts, strict=True):
        position = {str(entry.token_id): PromptLogprob(_finite(entry.logprob), entry.rank or 0, own_text)}
        for rank, ((token_id, logprob), text) in enumerate(zip(entry.top, top_texts, strict=True), 1):
            position.setdefault(str(token_id), PromptLogprob(_finite(logprob), rank, text))
        positions.append(position)
    return positions


def concatenate_logprobs(parts: Sequence[CompletionLogprobs]) -> CompletionLogprobs | None:
    if not parts:
        return None
    return CompletionLogprobs(
        tokens=[token for part in parts for token in part.tokens],
        token_logprobs=[value for part in parts for value in part.token_logprobs],
        top_logprobs=[top for part in parts for top in part.top_logprobs],
        text_offset=[offset for part in parts for offset in part.text_offset],
    )


def token_texts(
    entries: Sequence[TokenLogprobs], texts: Sequence[Sequence[str]], tokenizer: Tokenizer | None
) -> Sequence[Sequence[str]]:
    """Return, for each position, the text of its token, followed by the texts of its `top` tokens.

    These are the engine's `texts`, if it sent any.
    """
    if len(texts) == len(entries):
        return texts
    return [[_text(token, tokenizer) for token in (entry.token_id, *(t for t, _ in entry.top))] for entry in entries]


def _text(token_id: int, tokenizer: Tokenizer | None) -> str:
    return f"token_id:{token_id}" if tokenizer is None else tokenizer.token_text(token_id)


def _top(entry: TokenLogprobs, texts: Sequence[str]) -> dict[str, float]:
    top = {text: _finite(value) for text, (_, value) in zip(texts[1:], entry.top, strict=True)}
    top.setdefault(texts[0], _finite(entry.logprob))
    return top


def _chat_entry(entry: TokenLogprobs, texts: Sequence[str]) -> TokenLogprob:
    tops = [
        TopLogprob(text, _finite(value), list(text.encode()))
        for text, (_, value) in zip(texts[1:], entry.top, strict=True)
    ]
    return TokenLogprob(texts[0], _finite(entry.logprob), list(texts[0].encode()), tops)


def _finite(logprob: float) -> float:
    """Replace minus infinity, which JSON cannot represent, by -9999, as OpenAI does."""
    return max(logprob, -9999.0)
