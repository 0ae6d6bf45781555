"""Text to token ids and back, for text as it is and for conversations through the model's chat template.

Gives the ids that transformers' tokenizer of the same files gives. Knows no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Protocol

import msgspec

from kvscope_engine.model.text.bounded_turns import MAX_TEMPLATE_S, BoundedTurns
from kvscope_engine.model.text.detokenizer import Detokenizer
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import MAX_PROMPT_CHARACTERS, ChatMessage, ToolCall


class Codec(Protocol):
    """What encodes and decodes."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Ids of `text`."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of `ids`."""

    def vocabulary(self) -> Mapping[str, int]:
        """Ids by token, those added later too."""

    def special_ids(self) -> frozenset[int]:
        """Tokens that `decode` can skip."""

    def is_byte_level(self) -> bool:
        """Whether tokens are written in GPT-2's letters for bytes."""

    def fewest_tokens(self, text: str, enough: int) -> int:
        """A number of tokens that `text` has at least, in little time; `enough`, or more, ends the counting."""


class Tokenizer:
    """A model's tokenizer. Read only; threads may share it."""

    def __init__(
        self,
        codec: Codec,
        special_tokens: Mapping[str, str],
        chat_template: str | None = None,
    ) -> None:
        """`special_tokens` are by role, `eos_token` and so on: a chat template may ask for them."""
        self._codec = codec
        self._special = dict(special_tokens)
        self.chat_template = chat_template

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Special tokens written out in it count as such, as in transformers."""
        return self._codec.encode(valid_text(text), add_special_tokens)

    def chat(
        self,
        messages: Sequence[ChatMessage | Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
    ) -> list[int]:
        """Token ids of a conversation, ready for the answer.

        Raises BadInput when the model has no chat template, when the template refuses the conversation, or when
        it takes longer than `MAX_TEMPLATE_S` over it.
        """
        text = self.chat_text(messages, add_generation_prompt=add_generation_prompt, tools=tools)
        return self.encode(text, add_special_tokens=False)

    def chat_text(
        self,
        messages: Sequence[ChatMessage | Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
    ) -> str:
        """The conversation as the model's template writes it. `tools` are functions as OpenAI describes them."""
        from transformers.utils.chat_template_utils import _compile_jinja_template

        if self.chat_template is None:
            raise BadInput("this model has no chat template: only raw prompts are accepted")
        if not messages:
            raise BadInput("messages is empty: at least one message is accepted")
        try:
            # Not by `render_jinja_template`: it copies the turns into a plain list, which knows no end.
            template: Any = _compile_jinja_template(self.chat_template)
            rendered = template.render(
                messages=BoundedTurns(map(_turn, messages), MAX_TEMPLATE_S),
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special,
            )
        except Exception as error:  # the template is the model's own program: anything may come out of it
            line = (str(error).splitlines() or [type(error).__name__])[0]
            raise BadInput(f"the model's chat template refuses the conversation: {line:.200}") from error
        return str(rendered)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of `ids`, with special tokens written out unless skipped."""
        return self._codec.decode(ids, skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Text of one token on its own; replacement characters where it is a part of a character."""
        return self._codec.decode([token_id], False)

    def detokenizer(self, stop: Sequence[str] = (), context: Sequence[int] = ()) -> Detokenizer:
        """For the text of one answer as it streams: special tokens are skipped, `stop` strings end it.

        `context` are the tokens that the text goes on from: with them its first word keeps the space before it.
        """
        return Detokenizer(partial(self._codec.decode, skip_special_tokens=True), stop, context)

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """By role, as a chat template asks for them."""
        return self._special

    @cached_property
    def vocabulary(self) -> Mapping[str, int]:
        """Ids by token as the vocabulary writes it."""
        return self._codec.vocabulary()

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """Tokens that an answer's text does not show."""
        return self._codec.special_ids()

    @cached_property
    def special_texts(self) -> Mapping[str, int]:
        """The same by how the vocabulary writes them."""
        special = self.special_token_ids
        return {text: token_id for text, token_id in self.vocabulary.items() if token_id in special}

    @property
    def is_byte_level(self) -> bool:
        """Whether tokens are written in GPT-2's letters for bytes."""
        return self._codec.is_byte_level()

    @property
    def vocab_size(self) -> int:
        """Number of tokens. The model's embedding may have more rows than this."""
        return len(self.vocabulary)

    @property
    def bos_token_id(self) -> int | None:
        """Id of the token that begins a text, where there is one."""
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token that ends a text, where there is one."""
        return self._special_id("eos_token")

    def refuse_too_long(self, text: str, max_len: int) -> None:
        """Raise BadInput for a prompt that has `max_len` tokens or more whatever they are, before they are made."""
        if len(text) > MAX_PROMPT_CHARACTERS:
            raise BadInput(f"the prompt has {len(text)} characters: at most {MAX_PROMPT_CHARACTERS} are accepted")
        fewest = self._codec.fewest_tokens(text, max_len)
        if fewest >= max_len:
            accepted = f"at most {max_len - 1} are accepted (the limit of {max_len} includes prompt and output)"
            raise BadInput(f"the prompt has {len(text)} characters, which are more than {max_len} tokens: {accepted}")

    def _special_id(self, role: str) -> int | None:
        token = self._special.get(role)
        return None if token is None else self.vocabulary.get(token)


def _turn(message: ChatMessage | Mapping[str, str]) -> dict[str, Any]:
    if isinstance(message, ChatMessage):
        return as_template_reads(message)
    return {key: valid_text(value) for key, value in message.items()}


# One turn of a conversation as chat templates read it: a plain dictionary, with what the turn does not have left out.
#
# Owns the form of tool calls: that of OpenAI, with arguments as an object, which is what templates write out as JSON.
def as_template_reads(message: ChatMessage) -> dict[str, Any]:
    """Raises BadInput for text that is no text, and for arguments of a call that are no JSON object."""
    turn: dict[str, Any] = {"role": message.role, "content": valid_text(message.content)}
    if message.tool_calls:
        turn["tool_calls"] = [_call(call) for call in message.tool_calls]
    for name in ("tool_call_id", "name"):
        if value := getattr(message, name):
            turn[name] = valid_text(value)
    return turn


def valid_text(text: str) -> str:
    """Raises BadInput for half a surrogate pair: it has no bytes, so no tokens."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadInput(f"text is not accepted: {text[error.start]!r} at {error.start} is no character") from error
    return text


def _call(call: ToolCall) -> dict[str, Any]:
    try:
        arguments = msgspec.json.decode(call.arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        reason = f"a JSON object ({error})"
        raise BadInput(f"arguments={call.arguments!r:.60} of {call.name!r:.40} are not accepted: {reason}") from None
    return {"id": call.id, "type": "function", "function": {"name": valid_text(call.name), "arguments": arguments}}
