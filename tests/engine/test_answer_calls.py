"""Calls of functions in answers to requests of the command socket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from kvscope_engine.answer_calls import AnswerCallReader
from kvscope_engine.outputs import OutputStream
from kvscope_engine.policy.request import Request
from kvscope_engine.tokenization.tokenizer import Detokenizer, Tokenizer
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import Finished, Submit, ToolCall
from kvscope_telemetry.messages.sampling_params import SamplingParams

WORDS = ("<s>", "Well. ", "<tool_call>", '{"name": "time", "arguments": {"zone": "CET"}}', "</tool_call>", "</s>")
TEMPLATE = "{% if tools %}<tool_call>{% endif %}{{ messages }}"
TOOLS = '[{"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}]'


class WordCodec:
    """Tokenizer whose tokens are whole words; `special` are the special ones."""

    def __init__(self, special: frozenset[int]) -> None:
        self._special = special

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [WORDS.index(text)]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return "".join(WORDS[token] for token in ids if not (skip_special_tokens and token in self._special))

    def vocabulary(self) -> Mapping[str, int]:
        return {word: token for token, word in enumerate(WORDS)}

    def special_ids(self) -> frozenset[int]:
        return self._special

    def is_byte_level(self) -> bool:
        return False

    def fewest_tokens(self, text: str, enough: int) -> int:
        return 0


def tokenizer(special: frozenset[int] = frozenset((0, 5)), template: str = TEMPLATE) -> Tokenizer:
    return Tokenizer(WordCodec(special), {}, template)


def submit(tools: str = TOOLS) -> Submit:
    return Submit(request_id="r", prompt="x", tools=tools)


@pytest.mark.parametrize("special", [frozenset((0, 5)), frozenset((0, 2, 4, 5))], ids=["text", "special tokens"])
def test_calls_and_text_are_separated_at_the_end_of_an_answer(special: frozenset[int]) -> None:
    words = tokenizer(special)
    request = Request(1, "r", [0], SamplingParams().resolved(None), 10, arrival_ns=0)
    detokenizer = Detokenizer(lambda ids: words.decode(list(ids)), ())
    stream = OutputStream(request, "r", detokenizer, frozenset({5}))
    stream.read_calls = AnswerCallReader(submit(), words).read
    for token in (1, 2, 3, 4, 5):
        stream.add_token(token, None, 1)
    stream.finish("stop", 2)
    last = stream.drain()[-1]
    assert isinstance(last, Finished)
    (call,) = last.tool_calls
    assert call == ToolCall(id=call.id, name="time", arguments='{"zone":"CET"}')
    assert call.id
    assert last.content == "Well. "


def test_answer_without_calls_keeps_its_text() -> None:
    found = AnswerCallReader(submit(), tokenizer()).read([0], [1], "Well. ")
    assert (found.content, found.calls) == ("Well. ", ())


@pytest.mark.parametrize("tools", ["[{}]", '[{"type": "web_search"}]', "{"])
def test_tools_that_are_no_functions_are_refused(tools: str) -> None:
    with pytest.raises(BadInput, match="tools="):
        AnswerCallReader(submit(tools), tokenizer())


def test_template_that_ignores_tools_is_refused() -> None:
    with pytest.raises(BadInput, match="chat template does not show them"):
        AnswerCallReader(submit(), tokenizer(template="{{ messages }}"))
