"""Forced tool calls: every text allowed by the grammar is read as calls of the intended functions."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from kvscope_engine.http.schemas.request_bodies import Function
from kvscope_engine.http.tool_calling.structural_tags import forced_format, structural_tag
from kvscope_engine.http.tool_calling.tool_call_formats import FORMATS_BY_NAME, JSON_LIST_FORMAT
from kvscope_engine.http.tool_calling.tool_call_reader import ToolCallReader

xgrammar = pytest.importorskip("xgrammar")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Paris"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
NONE: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
FUNCTIONS = [Function(name="weather", parameters=SCHEMA), Function(name="time", parameters=NONE)]
END = 256


@pytest.fixture(scope="module")
def compiler() -> Any:
    """Grammar compiler whose tokens are single bytes and an end token."""
    info = xgrammar.TokenizerInfo([bytes([n]) for n in range(END)] + ["<end>"], stop_token_ids=[END])
    return xgrammar.GrammarCompiler(info)


def walk(compiler: Any, tag: str, seed: int) -> str:
    """Return a random text of the grammar, ending where it may end."""
    matcher = xgrammar.GrammarMatcher(compiler.compile_structural_tag(tag))
    chance, text = random.Random(seed), bytearray()
    while not matcher.is_terminated():
        words = np.full((1, 9), -1, np.int32)
        matcher.fill_next_token_bitmask(words, 0)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[: END + 1])
        solid = [token for token in allowed if token == END or token not in b" \t\r"] or list(allowed)
        token = END if END in allowed and chance.random() < 0.5 else int(chance.choice(solid))
        assert matcher.accept_token(token)
        text += bytes([token]) if token != END else b""
        assert len(text) < 20_000
    return text.decode()


@pytest.mark.parametrize("name", sorted(FORMATS_BY_NAME))
@pytest.mark.parametrize("is_one", [True, False])
def test_every_text_allowed_by_a_forced_tool_call_grammar_is_read_as_calls(
    compiler: Any, name: str, is_one: bool
) -> None:
    tool_format = forced_format(FORMATS_BY_NAME[name], FUNCTIONS, ())
    tag = structural_tag(tool_format.forced, FUNCTIONS, is_one=is_one)
    tools = {function.name: function.parameters or {} for function in FUNCTIONS}
    for seed in range(4):
        text = walk(compiler, tag, seed)
        reader = ToolCallReader(tool_format, tools)
        said = [*map(reader.add, text), reader.flush()]
        calls = [call.function for _, calls in said for call in calls]
        assert "".join(piece for piece, _ in said).strip() == "", text
        assert calls, text
        assert len(calls) == 1 or not is_one, text
        for call in calls:
            arguments = json.loads(call.arguments)
            assert arguments == {} if call.name == "time" else arguments.keys() == {"city", "days"}, text


def test_forced_tool_call_whose_format_has_special_token_marks_uses_the_json_list_format() -> None:
    assert (
        forced_format(FORMATS_BY_NAME["kimi_k2"], FUNCTIONS, ("<|tool_call_end|>", "<s>")).name == JSON_LIST_FORMAT.name
    )
    assert forced_format(FORMATS_BY_NAME["kimi_k2"], FUNCTIONS, ("<s>",)) is FORMATS_BY_NAME["kimi_k2"]
    assert forced_format(FORMATS_BY_NAME["mistral"], FUNCTIONS, ()).has_short_ids
    assert forced_format(FORMATS_BY_NAME["qwen3_coder"], [Function(name="a>b")], ()).name == "list"
