"""Inserts the tokens of earlier answers into a prompt as the engine generated them.

Tokenizing the text of an answer often gives other tokens than a model chose, from which on the prompt differs from the
cached one. With the generated tokens, a follow-up finds all full blocks of the turns before it in the prefix cache.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from kvscope_engine.tokenization.tokenizer import Tokenizer
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import ChatMessage


def with_generated_tokens(
    tokenizer: Tokenizer,
    messages: Sequence[ChatMessage],
    render: Callable[[Sequence[ChatMessage]], str],
    ids: list[int],
) -> list[int]:
    """Return the prompt's tokens with those of the answers in `messages` that have `token_ids`.

    `ids` are the tokens of the conversation's text. They are returned unchanged if the template does not contain each
    answer exactly as it was generated (it may remove reasoning), or if the tokens have another text.
    """
    answers = [message for message in messages if message.role == "assistant" and message.token_ids]
    if not answers:
        return ids
    generated = {id(message): _without_end(tokenizer, message.token_ids) for message in answers}
    if any(not 0 <= token < tokenizer.vocab_size for tokens in generated.values() for token in tokens):
        return ids
    marks = {id(message): f"answer-{secrets.token_hex(12)}" for message in answers}
    try:
        rest = render([replace(one, content=marks[id(one)]) if id(one) in marks else one for one in messages])
    except BadInput:
        return ids
    found: list[int] = []
    for message in answers:
        before, mark, rest = rest.partition(marks[id(message)])
        if not mark or marks[id(message)] in rest:
            return ids
        found += [*tokenizer.encode(before, add_special_tokens=False), *generated[id(message)]]
    found += tokenizer.encode(rest, add_special_tokens=False)
    return found if tokenizer.decode(found) == tokenizer.decode(ids) else ids


def _without_end(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[int]:
    """Return the tokens without special ones at their end, which the chat template adds itself."""
    end = len(token_ids)
    while end and token_ids[end - 1] in tokenizer.special_token_ids:
        end -= 1
    return list(token_ids[:end])
