"""Tokenizer: encodes text and conversations (with the model's chat template), and decodes complete sequences or streams
of token ids.

Token ids are identical to those of transformers' tokenizer from the same files. Owns the text of a streaming answer
that is not released yet. Stop strings are found regardless of token boundaries. Independent of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import tokenizers

from kvscope_engine.tokenization import chat_template
from kvscope_engine.tokenization.fewest_tokens import FewestTokens, is_certainly_shorter
from kvscope_telemetry.errors import BadInput, PromptTooLong
from kvscope_telemetry.messages.commands import MAX_PROMPT_CHARACTERS, ChatMessage, ToolCall
from kvscope_telemetry.printable import valid_text

REPLACEMENT: Final = "�"
WINDOW: Final = 16
"""Number of trailing tokens that are decoded again for each new token. The first tokens of the window have been
returned already; they are decoded only because leading spaces depend on the preceding tokens.
"""
MAX_WINDOW: Final = 256
"""Number of consecutive tokens without a complete character after which their text is flushed, with replacement
characters.
"""

_PROBE: Final = "kvscope"
"""Text that no chat template contains. It is rendered as a message to test which content format a template supports."""

Decode = Callable[[Sequence[int]], str]


class Codec(Protocol):
    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str: ...

    def vocabulary(self) -> Mapping[str, int]:
        """Return a map from token text to id, including added tokens."""

    def special_ids(self) -> frozenset[int]:
        """Return the ids of the tokens that `decode` omits with `skip_special_tokens`."""

    def is_byte_level(self) -> bool:
        """Return whether the vocabulary is written in GPT-2's byte-level alphabet."""

    def fewest_tokens(self, text: str, enough: int) -> int:
        """Return a lower bound of the number of tokens in `text`, without tokenizing. Counting may stop when
        the bound exceeds `enough`.
        """


class Tokenizer:
    """A model's tokenizer. Immutable, and therefore thread-safe."""

    def __init__(
        self,
        codec: Codec,
        special_tokens: Mapping[str, str],
        chat_template: str | None = None,
    ) -> None:
        """`special_tokens` maps roles such as `eos_token` to token texts, for use in chat templates."""
        self._codec = codec
        self._special = dict(special_tokens)
        self.chat_template = chat_template

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`. Raises BadInput for invalid Unicode.

        Special tokens that are spelled out in the text are encoded as special tokens, as in transformers.
        """
        return self._codec.encode(valid_text(text), add_special_tokens)

    def chat(
        self,
        messages: Sequence[ChatMessage | Mapping[str, str]],
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation, by default followed by the tokens that begin the assistant's turn.

        Raises BadInput if the model has no chat template, if the template refuses the conversation, or if rendering
        takes longer than `chat_template.MAX_TEMPLATE_S`.
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
        """Return the conversation as formatted by the model's template.

        `tools` are function definitions in OpenAI's format. Raises BadInput like `chat`.
        """
        if self.chat_template is None:
            raise BadInput("this model has no chat template: only raw prompts are accepted")
        if not messages:
            raise BadInput("messages is empty: at least one message is accepted")
        try:
            variables = {
                "messages": list(self.to_template_content(map(_as_turn, messages))),
                "tools": tools,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            }
            return chat_template.render(self.chat_template, self._special | variables)
        except Exception as error:  # a template is a program: it may raise anything
            line = (str(error).splitlines() or [type(error).__name__])[0]
            raise BadInput(f"the model's chat template refuses the conversation: {line:.200}") from error

    def to_template_content(self, turns: Iterable[dict[str, Any]]) -> Iterable[dict[str, Any]]:
        """Convert the content of turns to the format that the chat template reads.

        Templates of some vision models read only lists of parts such as `{"type": "text", "text": ...}`.
        """
        return map(_as_parts, turns) if self._reads_only_parts else turns

    @cached_property
    def _reads_only_parts(self) -> bool:
        return not self._writes_content(_PROBE) and self._writes_content([{"type": "text", "text": _PROBE}])

    def _writes_content(self, content: Any) -> bool:
        turns = [{"role": "user", "content": content}]
        try:
            variables = {"messages": turns, "tools": None, "documents": None}
            return _PROBE in chat_template.render(self.chat_template or "", self._special | variables)
        except Exception:  # a template that fails here fails for real turns, too
            return False

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self._codec.decode(ids, skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Return the text of a single token; with replacement characters if it is only a part of a character."""
        return self._codec.decode([token_id], False)

    def detokenizer(self, stop: Sequence[str] = (), context: Sequence[int] = ()) -> Detokenizer:
        """Return a detokenizer for one streaming answer, which skips special tokens and ends at `stop` strings.

        `context` contains the tokens before the answer. With them, the first word keeps its leading space.
        """
        return Detokenizer(partial(self._codec.decode, skip_special_tokens=True), stop, context)

    @property
    def special_tokens(self) -> Mapping[str, str]:
        return self._special

    @cached_property
    def vocabulary(self) -> Mapping[str, int]:
        return self._codec.vocabulary()

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """Ids of the tokens that are omitted from an answer's text."""
        return self._codec.special_ids()

    @cached_property
    def special_texts(self) -> Mapping[str, int]:
        special = self.special_token_ids
        return {text: token_id for text, token_id in self.vocabulary.items() if token_id in special}

    @property
    def is_byte_level(self) -> bool:
        return self._codec.is_byte_level()

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary. The model's embedding may have more rows."""
        return len(self.vocabulary)

    @property
    def bos_token_id(self) -> int | None:
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._special_id("eos_token")

    def warm_up(self) -> None:
        """Compile the chat template and tokenize one message, so that the first request need not wait for it."""
        with suppress(BadInput):  # no template, or one that refuses such a conversation
            self.encode(self.chat_text([ChatMessage(role="user", content="a")]), add_special_tokens=False)

    def refuse_too_long(self, text: str, max_len: int) -> None:
        """Raise BadInput if `text` is certain to have `max_len` tokens or more. Does not tokenize."""
        if len(text) > MAX_PROMPT_CHARACTERS:
            raise PromptTooLong(f"the prompt has {len(text)} characters: send at most {MAX_PROMPT_CHARACTERS}")
        if is_certainly_shorter(text, max_len):
            return  # the first use of the bound below reads the whole vocabulary, which takes up to 0.5 s
        fewest = self._codec.fewest_tokens(text, max_len)
        if fewest >= max_len:
            accepted = f"send at most {max_len - 1} (the limit of {max_len} includes prompt and output)"
            raise PromptTooLong(
                f"the prompt has {len(text)} characters, which are more than {max_len} tokens: {accepted}"
            )

    def _special_id(self, role: str) -> int | None:
        token = self._special.get(role)
        return None if token is None else self.vocabulary.get(token)


def _as_parts(turn: dict[str, Any]) -> dict[str, Any]:
    content = turn.get("content")
    return turn | {"content": [{"type": "text", "text": content}]} if isinstance(content, str) else turn


def _as_turn(message: ChatMessage | Mapping[str, str]) -> dict[str, Any]:
    if isinstance(message, ChatMessage):
        return to_template_message(message)
    return {key: valid_text(value) for key, value in message.items()}


# Conversion of a turn for chat templates: a dictionary without absent fields. Tool calls are in OpenAI's format, except
# that arguments are an object, because templates serialize them to JSON themselves.
def to_template_message(message: ChatMessage) -> dict[str, Any]:
    """Convert a message to a dictionary for chat templates.

    Raises BadInput for invalid Unicode, and for tool call arguments that are not a JSON object.
    """
    turn: dict[str, Any] = {"role": message.role, "content": valid_text(message.content)}
    if message.tool_calls:
        turn["tool_calls"] = [_as_tool_call(call) for call in message.tool_calls]
    for name in ("tool_call_id", "name"):
        if value := getattr(message, name):
            turn[name] = valid_text(value)
    return turn


def _as_tool_call(call: ToolCall) -> dict[str, Any]:
    try:
        arguments = msgspec.json.decode(call.arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        reason = f"a JSON object ({error})"
        raise BadInput(f"arguments={call.arguments!r:.60} of {call.name!r:.40} are not accepted: {reason}") from None
    return {"id": call.id, "type": "function", "function": {"name": valid_text(call.name), "arguments": arguments}}


# Streaming decoders.
class IncrementalDecoder:
    """Decodes tokens one at a time, and returns the text that each one completes.

    The concatenated pieces equal the text of `context` and all tokens decoded together, minus the text of `context`. A
    character whose bytes are spread over several tokens is returned with the last of them.
    """

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids: list[int] = list(context[-WINDOW // 2 :])
        text = decode(self._ids) if self._ids else ""
        self._num_returned = len(text.rstrip(REPLACEMENT))
        """Number of characters of the window's text that have been returned."""
        self._cut_index = len(self._ids) if self._num_returned == len(text) else 0
        """Index in the window at which a token starts at a character boundary, so that the tokens before it can
        be dropped; 0 if no index is known.
        """

    def add_token(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if not text.endswith(REPLACEMENT):
            piece, self._num_returned = text[self._num_returned :], len(text)
            self._slide()
            return piece
        return self.flush() if len(self._ids) >= MAX_WINDOW else ""

    def flush(self) -> str:
        """Return the remaining text at the end of the answer, with replacement characters for incomplete characters."""
        piece = self._decode(self._ids)[self._num_returned :] if self._ids else ""
        self._ids, self._num_returned, self._cut_index = [], 0, 0
        return piece

    def _slide(self) -> None:
        """After a complete character, limit the number of tokens in the window: record the window's end as the
        next cut if no cut is recorded, otherwise drop the tokens before the recorded cut once the window is
        long enough.
        """
        if not self._cut_index:
            if len(self._ids) >= WINDOW // 2:
                self._cut_index = len(self._ids)
            return
        if len(self._ids) < WINDOW:
            return
        context = self._ids[self._cut_index :]
        text = self._decode(context)
        if text and not text.endswith(REPLACEMENT):
            self._ids, self._num_returned, self._cut_index = context, len(text), 0


class Detokenizer:
    """Streams the text of one answer up to the first of its stop strings.

    Text that may be the beginning of a stop string is not returned until later tokens decide.
    """

    def __init__(self, decode: Decode, stop: Sequence[str] = (), context: Sequence[int] = ()) -> None:
        self._decoder = IncrementalDecoder(decode, context)
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False

    def add_token(self, token_id: int, *, may_stop: bool = True) -> str:
        """Add a token and return the text that can be shown now; "" once a stop string was found, before which the text
        ends.

        With `may_stop=False` (below `min_tokens`), stop strings are ignored.
        """
        if self.stopped:
            return ""
        return self._release_text(self._decoder.add_token(token_id), may_stop)

    def flush(self) -> str:
        """Return the remaining text at the end of the answer; empty after a stop string."""
        if self.stopped:
            return ""
        piece = self._release_text(self._decoder.flush(), may_stop=True)
        remaining, self._held = piece + self._held, ""
        return remaining

    def _release_text(self, piece: str, may_stop: bool) -> str:
        if not self._stop or not may_stop:
            piece, self._held = self._held + piece, ""
            return piece
        text = self._held + piece
        stop_start = _first_stop(text, self._stop)
        if stop_start is not None:
            self.stopped, self._held = True, ""
            return text[:stop_start]
        num_released = len(text) - _held_length(text, self._stop)
        self._held = text[num_released:]
        return text[:num_released]


def _first_stop(text: str, stop: Sequence[str]) -> int | None:
    positions = [position for position in (text.find(string) for string in stop) if position >= 0]
    return min(positions, default=None)


def _held_length(text: str, stop: Sequence[str]) -> int:
    return max(_overlap(text, string) for string in stop)


def _overlap(text: str, string: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `string`."""
    start = text.find(string[0], max(0, len(text) - len(string) + 1))
    while start >= 0 and not string.startswith(text[start:]):
        start = text.find(string[0], start + 1)
    return len(text) - start if start >= 0 else 0


# Codecs: a `tokenizers` file, or a Python class of transformers.
class FastCodec:
    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend

    @classmethod
    def from_file(cls, path: Path) -> FastCodec:
        """Load a `tokenizer.json`. Raises BadInput if it is invalid."""
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # tokenizers raises bare Exception
            raise BadInput(f"{path} is not a tokenizer: {error!s:.200}") from error

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # `encode` holds the GIL while it runs, so a long text would block the whole engine; the batch call releases it.
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
        """Return whether every character can be encoded without the unknown token (byte-level or byte fallback)."""
        parts = f"{self._backend.pre_tokenizer} {self._backend.decoder}"
        return "ByteLevel" in parts or "ByteFallback" in parts

    def fewest_tokens(self, text: str, enough: int) -> int:
        return self._fewest_tokens(text, enough)

    @cached_property
    def _fewest_tokens(self) -> FewestTokens:
        any_character = self.has_any_character()
        return FewestTokens(self._backend, is_byte_level=self.is_byte_level(), has_any_character=any_character)


class PythonCodec:
    """Codec that uses a Python tokenizer of transformers without a `tokenizers` equivalent."""

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
        return 0  # nothing is known about how a Python tokenizer changes a text
