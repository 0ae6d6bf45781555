"""Converts a client's request to token ids: chat template, tokenizer, limits. Stateless."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from kvscope_engine.tokenization.chat_template import TOOLS_VARIABLE
from kvscope_engine.tokenization.generated_tokens import with_generated_tokens
from kvscope_telemetry.errors import BadInput, PromptTooLong
from kvscope_telemetry.messages.commands import ChatMessage, Submit
from kvscope_telemetry.messages.sampling_params import SamplingParams
from kvscope_telemetry.printable import valid_text

if TYPE_CHECKING:
    from kvscope_engine.tokenization.tokenizer import Tokenizer


def prompt_token_ids(submit: Submit, tokenizer: Tokenizer | None, vocab_size: int, max_len: int) -> list[int]:
    """Return the token ids of the prompt of `submit`.

    Raises:
        BadInput: unless exactly one kind of prompt is given; if the prompt is empty, certainly longer than `max_len`
            tokens, or has an id outside `vocab_size`; or for options that the model does not support.
    """
    prompt_fields = [name for name in ("prompt", "messages", "prompt_token_ids") if getattr(submit, name) is not None]
    if len(prompt_fields) != 1:
        raise BadInput(f"exactly one of prompt, messages, prompt_token_ids is accepted, not {prompt_fields or 'none'}")
    _check_sampling(submit.sampling, tokenizer, vocab_size)
    valid_text(submit.cache_salt, name="cache_salt")
    if submit.prompt_token_ids is not None:
        return _checked_ids(submit.prompt_token_ids, vocab_size, max_len)
    if tokenizer is None:
        raise BadInput("this model has no tokenizer: only prompt_token_ids are accepted")
    is_raw = submit.raw and submit.prompt is not None
    turns = () if is_raw else _conversation(submit)
    tools = parse_tools(submit.tools)
    if tools and not TOOLS_VARIABLE.search(tokenizer.chat_template or ""):
        raise BadInput("tools are not accepted: the model's chat template does not show them to the model")
    render = partial(tokenizer.chat_text, tools=tools)
    text = submit.prompt or "" if is_raw else render(turns)
    tokenizer.refuse_too_long(text, max_len)
    ids = with_generated_tokens(tokenizer, turns, render, tokenizer.encode(text, add_special_tokens=is_raw))
    if not ids or (submit.prompt is not None and not submit.prompt):
        raise BadInput("the prompt is empty: at least one token is accepted")
    return ids


def parse_tools(text: str) -> list[dict[str, Any]] | None:
    """Parse the JSON array of the functions that a model may call; None if there are none. Raises BadInput for any
    other JSON.
    """
    if not text:
        return None
    try:
        tools = msgspec.json.decode(text, type=list[dict[str, Any]])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise BadInput(f"tools={text!r:.60} is not accepted: must be a JSON array of objects ({error})") from None
    return tools or None


def _check_sampling(sampling: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int) -> None:
    if tokenizer is None:
        for name in ("stop", "structured"):
            if getattr(sampling, name):
                raise BadInput(f"{name} is not accepted: this model has no tokenizer, so no text in which to find it")
    for name in ("stop_token_ids", "logit_bias"):
        largest = max(getattr(sampling, name), default=0)
        if largest >= vocab_size:
            raise BadInput(f"token {largest} of {name} is not accepted: must be 0 to {vocab_size - 1}")


def _conversation(submit: Submit) -> tuple[ChatMessage, ...]:
    if submit.messages is None:
        return (ChatMessage(role="user", content=submit.prompt or ""),)
    if not submit.messages:
        raise BadInput("messages is empty: at least one message is accepted")
    return submit.messages


def _checked_ids(ids: Sequence[int], vocab_size: int, max_len: int) -> list[int]:
    if not ids:
        raise BadInput("prompt_token_ids is empty: at least one token is accepted")
    if len(ids) >= max_len:
        raise PromptTooLong(
            f"the prompt has {len(ids)} tokens: send at most {max_len - 1}"
            f" (the limit of {max_len} includes prompt and output)"
        )
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        raise BadInput(f"token id {low if low < 0 else high} is not accepted: must be 0 to {vocab_size - 1}")
    return list(ids)
