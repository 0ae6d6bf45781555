"""A template that looks through all turns at each of them is ended; one that does not has all the time it needs."""

from __future__ import annotations

import pytest

from kvscope_engine.model.text.bounded_turns import BoundedTurns
from kvscope_engine.model.text.tokenizer import Tokenizer
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import ChatMessage

QUADRATIC = (
    "{%- for m in messages %}{%- if messages[loop.index0:] | selectattr('role', 'equalto', 'system') | list %}"
    "S{%- endif %}{{ m.content }}{%- endfor %}"
)
NESTED = (
    "{%- for m in messages %}{%- for n in messages %}{%- if m.role != n.role %}x{%- endif %}{%- endfor %}{%- endfor %}"
)
PLAIN = "{%- for m in messages %}{{ m.role }}: {{ m.content }}\n{%- endfor %}{{ messages[-1].role }}"


class Codec:
    """Characters."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [ord(character) for character in text]


def _turns(count: int) -> list[ChatMessage]:
    return [ChatMessage(role="assistant" if i % 2 else "user", content="x") for i in range(count)]


def _tokenizer(template: str) -> Tokenizer:
    return Tokenizer(Codec(), {}, template)  # type: ignore[arg-type]


@pytest.mark.parametrize("template", [QUADRATIC, NESTED])
def test_a_conversation_that_takes_too_long_is_refused(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvscope_engine.model.text.tokenizer.MAX_TEMPLATE_S", 0.05)
    with pytest.raises(BadInput, match=r"refuses the conversation: it takes more than 0\.05 s for so many messages"):
        _tokenizer(template).chat(_turns(3_000))


def test_few_turns_are_never_too_many() -> None:
    text = _tokenizer(QUADRATIC).chat_text(_turns(3))
    assert text == "xxx"


def test_a_template_sees_a_list() -> None:
    assert _tokenizer(PLAIN).chat_text(_turns(2)) == "user: xassistant: xassistant"
    turns = BoundedTurns([{"role": "user"}, {"role": "system"}], 1.0)
    assert turns[::-1] == [{"role": "system"}, {"role": "user"}]
    assert isinstance(turns[1:], BoundedTurns)
    assert (len(turns), turns[0], list(turns)) == (2, {"role": "user"}, [{"role": "user"}, {"role": "system"}])
