"""Tool-call marks that are special tokens: made visible to the reader while all others stay hidden."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvscope_engine.http.schemas.request_bodies import Function
from kvscope_engine.http.tool_calling.answer_format import AnswerFormat, MarkedText, hidden_tokens
from kvscope_engine.http.tool_calling.tool_call_formats import FORMATS_BY_NAME
from kvscope_engine.http.tool_calling.tool_call_reader import ToolCallReader
from kvscope_engine.tokenization.tokenizer import Tokenizer
from kvscope_telemetry.messages.commands import Finished, RequestTiming, Tokens, Usage

WORDS = ("<s>", "[TOOL_CALLS]", "[ARGS]", "time", "{}", "Well, ", "</s>", "<think>", "</think>", "\n")
SPECIAL = frozenset((0, 1, 2, 6))


class WordCodec:
    """Tokenizer whose tokens are whole words."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [WORDS.index(text)]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return "".join(WORDS[token] for token in ids if not (skip_special_tokens and token in SPECIAL))

    def vocabulary(self) -> Mapping[str, int]:
        return {word: token for token, word in enumerate(WORDS)}

    def special_ids(self) -> frozenset[int]:
        return SPECIAL

    def is_byte_level(self) -> bool:
        return False

    def fewest_tokens(self, text: str, enough: int) -> int:
        return 0


TOKENIZER = Tokenizer(WordCodec(), {})


def test_tool_call_marks_that_are_special_tokens_are_read_and_others_stay_hidden() -> None:
    mistral = FORMATS_BY_NAME["mistral"]
    hidden = hidden_tokens(mistral, TOKENIZER)
    assert hidden == {0, 6}
    marked, reader = MarkedText(TOKENIZER, hidden), ToolCallReader(mistral, {"time": {}})
    shown, calls = "", []
    for token in (5, 1, 3, 2, 4, 6):
        text, more = reader.add(marked.add(Tokens(request_id="a", token_ids=(token,), text="")))
        shown, calls = shown + text, calls + more
    last = Finished(request_id="a", finish_reason="stop", usage=Usage(), timing=RequestTiming())
    text, more = reader.add(marked.add(last))
    rest, others = reader.flush()
    assert shown + text + rest == "Well, "
    assert [(call.function.name, call.function.arguments) for call in [*calls, *more, *others]] == [("time", "{}")]


def test_tool_call_format_with_textual_marks_hides_no_special_tokens() -> None:
    assert hidden_tokens(FORMATS_BY_NAME["hermes"], TOKENIZER) is None


def test_prompt_that_ends_with_the_reasoning_mark_begins_reasoning() -> None:
    use = AnswerFormat([Function(name="time")], FORMATS_BY_NAME["mistral"])
    answer = "[TOOL_CALLS]time{} </think>[TOOL_CALLS]time{}"
    for prompt, num_calls in (([5, 7, 9], 1), ([5, 7, 8], 2), ([], 2)):
        reader = use.reader(TOKENIZER, prompt)
        assert reader is not None
        reader.read(answer, is_last=True)
        assert reader.num_calls == num_calls
