"""A chat template that takes too long is stopped, wherever it spends its time."""

from __future__ import annotations

import sys

import pytest

from kvscope_engine.tokenization.tokenizer import Tokenizer
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import ChatMessage

QUADRATIC = (
    "{%- for m in messages %}{%- if messages[loop.index0:] | selectattr('role', 'equalto', 'system') | list %}"
    "S{%- endif %}{{ m.content }}{%- endfor %}"
)
NESTED = (
    "{%- for m in messages %}{%- for n in messages %}{%- if m.role != n.role %}x{%- endif %}{%- endfor %}{%- endfor %}"
)
RANGES = "{%- for a in range(99999) %}{%- for b in range(99999) %}{%- for c in range(99999) %}" + 3 * "{%- endfor %}"
MACRO = "{%- macro m(n) %}{%- if n %}{{ m(n - 1) }}{{ m(n - 1) }}{%- endif %}{%- endmacro %}{{ m(60) }}"
FILTERS = (
    "{%- set all = range(99999) | list %}{%- set all = all | map('string') | list %}"
    "{{ all | map('replace', '1', all | join) | map('length') | list }}"
)
PLAIN = "{%- for m in messages %}{{ m.role }}: {{ m.content }}\n{%- endfor %}{{ messages[-1].role }}"


class CharacterCodec:
    """A codec whose tokens are characters."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [ord(character) for character in text]


def _turns(count: int) -> list[ChatMessage]:
    return [ChatMessage(role="assistant" if i % 2 else "user", content="x") for i in range(count)]


def _tokenizer(template: str) -> Tokenizer:
    return Tokenizer(CharacterCodec(), {}, template)  # type: ignore[arg-type]


@pytest.mark.parametrize("template", [QUADRATIC, NESTED, RANGES, MACRO, FILTERS])
def test_slow_template_is_stopped_with_a_reason(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvscope_engine.tokenization.chat_template.MAX_TEMPLATE_S", 0.05)
    with pytest.raises(BadInput, match=r"refuses the conversation: it takes more than 0\.05 s"):
        _tokenizer(template).chat(_turns(3_000))


def test_chat_template_of_a_short_conversation_is_rendered() -> None:
    assert _tokenizer(QUADRATIC).chat_text(_turns(3)) == "xxx"
    assert _tokenizer(PLAIN).chat_text(_turns(2)) == "user: xassistant: xassistant"


def test_trace_function_of_a_debugger_is_restored_after_rendering() -> None:
    def trace(*_: object) -> None:
        return None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        _tokenizer(PLAIN).chat_text(_turns(2))
        assert sys.gettrace() is trace
    finally:
        sys.settrace(before)
