"""Text to token ids, for text as it is and for conversations through the model's chat template; and token ids to text,
at once, or one at a time as an answer streams.

Gives the ids that transformers' tokenizer of the same files gives. Owns the text of an answer that is not yet told:
stop strings end it wherever tokens are cut. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import tokenizers

from kvscope_engine.tokenization import chat_template
from kvscope_engine.tokenization.fewest_tokens import FewestTokens
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import MAX_PROMPT_CHARACTERS, ChatMessage, ToolCall

REPLACEMENT: Final = "�"
WINDOW: Final = 16
"""Tokens decoded again for each new one; the first few give the rest their context (leading spaces)."""
MAX_WINDOW: Final = 256
"""Tokens of broken bytes in a row after which nobody waits for the character to become whole."""

_PROBE: Final = "kvscope"
"""A text that no template writes by itself."""

Decode = Callable[[Sequence[int]], str]


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
        it takes longer than `chat_template.MAX_TEMPLATE_S`.
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
        if self.chat_template is None:
            raise BadInput("this model has no chat template: only raw prompts are accepted")
        if not messages:
            raise BadInput("messages is empty: at least one message is accepted")
        try:
            variables = {
                "messages": list(self.as_read(map(_turn, messages))),
                "tools": tools,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            }
            return chat_template.render(self.chat_template, self._special | variables)
        except Exception as error:  # the template is the model's own program: anything may come out of it
            line = (str(error).splitlines() or [type(error).__name__])[0]
            raise BadInput(f"the model's chat template refuses the conversation: {line:.200}") from error

    def as_read(self, turns: Iterable[dict[str, Any]]) -> Iterable[dict[str, Any]]:
        """Turns with their texts as the template reads them: some, of models that see, read lists of parts alone."""
        return map(_in_parts, turns) if self._reads_parts_alone else turns

    @cached_property
    def _reads_parts_alone(self) -> bool:
        return not self._writes(_PROBE) and self._writes([{"type": "text", "text": _PROBE}])

    def _writes(self, content: Any) -> bool:
        """Whether the template has the probe's text in what it makes of `content`."""
        turns = [{"role": "user", "content": content}]
        try:
            variables = {"messages": turns, "tools": None, "documents": None}
            return _PROBE in chat_template.render(self.chat_template or "", self._special | variables)
        except Exception:  # the template is the model's own program: what it makes of this, it says of real turns, too
            return False

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


def _in_parts(turn: dict[str, Any]) -> dict[str, Any]:
    content = turn.get("content")
    return turn | {"content": [{"type": "text", "text": content}]} if isinstance(content, str) else turn


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


# Token ids to text, one at a time, as an answer streams.
class IncrementalDecoder:
    """What each token adds to the text of those before it: first of all to that of `context`, whose own is not told.

    The pieces joined are the text of all tokens decoded at once, less that of the context. A character whose bytes
    are spread over tokens comes with the last of them.
    """

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids: list[int] = list(context[-WINDOW // 2 :])
        text = decode(self._ids) if self._ids else ""
        self._told = len(text.rstrip(REPLACEMENT))
        """Characters of the window's text that were handed out."""
        self._cut = len(self._ids) if self._told == len(text) else 0
        """Where the window can be cut: its tokens from there on start at a whole character. 0: nowhere."""

    def add_token(self, token_id: int) -> str:
        """The text that `token_id` completes."""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if not text.endswith(REPLACEMENT):
            piece, self._told = text[self._told :], len(text)
            self._slide()
            return piece
        return self.flush() if len(self._ids) >= MAX_WINDOW else ""

    def flush(self) -> str:
        """What is left at the end, with replacement characters for bytes that never became one."""
        piece = self._decode(self._ids)[self._told :] if self._ids else ""
        self._ids, self._told, self._cut = [], 0, 0
        return piece

    def _slide(self) -> None:
        """At the end of a whole character: note it as the next cut, or drop what is before the last one."""
        if not self._cut:
            if len(self._ids) >= WINDOW // 2:
                self._cut = len(self._ids)
            return
        if len(self._ids) < WINDOW:
            return
        context = self._ids[self._cut :]
        text = self._decode(context)
        if text and not text.endswith(REPLACEMENT):
            self._ids, self._told, self._cut = context, len(text), 0


class Detokenizer:
    """The text of one answer as it streams, up to the first of its stop strings.

    Text that may be the beginning of a stop string is held back until the next tokens tell.
    """

    def __init__(self, decode: Decode, stop: Sequence[str] = (), context: Sequence[int] = ()) -> None:
        self._decoder = IncrementalDecoder(decode, context)
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False
        """Whether a stop string came. Then the text ends before it, and nothing follows."""

    def add_token(self, token_id: int, *, may_stop: bool = True) -> str:
        """The text that can be told now. Without `may_stop` (below `min_tokens`) no stop string counts."""
        if self.stopped:
            return ""
        return self._take(self._decoder.add_token(token_id), may_stop)

    def flush(self) -> str:
        """The rest, at the end of an answer; nothing after a stop string."""
        if self.stopped:
            return ""
        piece = self._take(self._decoder.flush(), may_stop=True)
        rest, self._held = piece + self._held, ""
        return rest

    def _take(self, piece: str, may_stop: bool) -> str:
        if not self._stop or not may_stop:
            piece, self._held = self._held + piece, ""
            return piece
        text = self._held + piece
        found = _first_stop(text, self._stop)
        if found is not None:
            self.stopped, self._held = True, ""
            return text[:found]
        told = len(text) - _held_length(text, self._stop)
        self._held = text[told:]
        return text[:told]


def _first_stop(text: str, stop: Sequence[str]) -> int | None:
    """Where the earliest stop string begins."""
    places = [place for place in (text.find(string) for string in stop) if place >= 0]
    return min(places, default=None)


def _held_length(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of `text` that is the beginning of a stop string."""
    return max(_overlap(text, string) for string in stop)


def _overlap(text: str, string: str) -> int:
    """Length of the longest end of `text` that `string` begins with, `string` itself not counted."""
    place = text.find(string[0], max(0, len(text) - len(string) + 1))
    while place >= 0 and not string.startswith(text[place:]):
        place = text.find(string[0], place + 1)
    return len(text) - place if place >= 0 else 0


# The two ways a tokenizer comes: as a `tokenizers` file, or as one of transformers' classes in Python.
class FastCodec:
    """A `tokenizers.Tokenizer`."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """Padding and truncation that the file asks for are switched off."""
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend

    @classmethod
    def from_file(cls, path: Path) -> FastCodec:
        """The tokenizer in `path`. Raises BadInput when it is none."""
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # tokenizers raises bare Exception
            raise BadInput(f"{path} is not a tokenizer: {error!s:.200}") from error

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # Of a batch, because `encode` itself holds the interpreter until it is through: a long text, the whole engine.
        return list(self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))

    def vocabulary(self) -> Mapping[str, int]:
        return dict(self._backend.get_vocab(with_added_tokens=True))

    def special_ids(self) -> frozenset[int]:
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    def is_byte_level(self) -> bool:
        return "ByteLevel" in str(self._backend.decoder)

    def has_any_character(self) -> bool:
        """Whether every character has tokens of its own, so that none becomes unknown."""
        parts = f"{self._backend.pre_tokenizer} {self._backend.decoder}"
        return "ByteLevel" in parts or "ByteFallback" in parts

    def fewest_tokens(self, text: str, enough: int) -> int:
        return self._fewest_tokens(text, enough)

    @cached_property
    def _fewest_tokens(self) -> FewestTokens:
        any_character = self.has_any_character()
        return FewestTokens(self._backend, is_byte_level=self.is_byte_level(), has_any_character=any_character)


class PythonCodec:
    """One of transformers' tokenizers that has no `tokenizers` form."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return str(
            self._tokenizer.decode(
                list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )

    def vocabulary(self) -> Mapping[str, int]:
        return dict(self._tokenizer.get_vocab())

    def special_ids(self) -> frozenset[int]:
        return frozenset(self._tokenizer.all_special_ids)

    def is_byte_level(self) -> bool:
        return "Ġ" in self._tokenizer.get_vocab()

    def fewest_tokens(self, text: str, enough: int) -> int:
        return 0  # what it does with a text is its own code
