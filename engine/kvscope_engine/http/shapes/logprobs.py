"""Log-probabilities with the text of their tokens, in the two shapes that OpenAI has."""

from __future__ import annotations

from collections.abc import Sequence

from kvscope_engine.http.shapes.answers import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from kvscope_engine.tokenization.tokenizer import Tokenizer
from kvscope_telemetry.messages.commands import TokenLogprobs, Tokens


def chat_logprobs(tokens: Tokens, tokenizer: Tokenizer | None) -> ChatLogprobs | None:
    """Of a chat's new tokens; None where none were asked for."""
    if not tokens.logprobs:
        return None
    return ChatLogprobs(
        [_of_chat(one, texts) for one, texts in zip(tokens.logprobs, _texts(tokens, tokenizer), strict=True)]
    )


def completion_logprobs(tokens: Tokens, tokenizer: Tokenizer | None, offset: int) -> CompletionLogprobs | None:
    """Of a completion's new tokens, the first at character `offset` of its text; None where none were asked for."""
    if not tokens.logprobs:
        return None
    texts = _texts(tokens, tokenizer)
    offsets = []
    for own in texts:
        offsets.append(offset)
        offset += len(own[0])
    return CompletionLogprobs(
        tokens=[own[0] for own in texts],
        token_logprobs=[_finite(one.logprob) for one in tokens.logprobs],
        top_logprobs=[_top(one, own) for one, own in zip(tokens.logprobs, texts, strict=True)],
        text_offset=offsets,
    )


def joined(parts: Sequence[CompletionLogprobs]) -> CompletionLogprobs | None:
    """Those of a whole completion."""
    if not parts:
        return None
    return CompletionLogprobs(
        tokens=[token for part in parts for token in part.tokens],
        token_logprobs=[value for part in parts for value in part.token_logprobs],
        top_logprobs=[top for part in parts for top in part.top_logprobs],
        text_offset=[offset for part in parts for offset in part.text_offset],
    )


def _texts(tokens: Tokens, tokenizer: Tokenizer | None) -> Sequence[Sequence[str]]:
    """For each position the text of its token, then of each of its `top`: the engine's, or made here."""
    texts: Sequence[Sequence[str]] = getattr(tokens, "logprob_texts", ())
    if len(texts) == len(tokens.logprobs):
        return texts
    return [[_text(token, tokenizer) for token in (one.token_id, *(t for t, _ in one.top))] for one in tokens.logprobs]


def _text(token_id: int, tokenizer: Tokenizer | None) -> str:
    return f"token_id:{token_id}" if tokenizer is None else tokenizer.token_text(token_id)


def _top(one: TokenLogprobs, texts: Sequence[str]) -> dict[str, float]:
    top = {text: _finite(value) for text, (_, value) in zip(texts[1:], one.top, strict=True)}
    top.setdefault(texts[0], _finite(one.logprob))
    return top


def _of_chat(one: TokenLogprobs, texts: Sequence[str]) -> TokenLogprob:
    tops = [
        TopLogprob(text, _finite(value), list(text.encode()))
        for text, (_, value) in zip(texts[1:], one.top, strict=True)
    ]
    return TokenLogprob(texts[0], _finite(one.logprob), list(texts[0].encode()), tops)


def _finite(logprob: float) -> float:
    """JSON has no minus infinity; OpenAI writes -9999."""
    return max(logprob, -9999.0)
