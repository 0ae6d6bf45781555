"""What is remembered of rules, and what of it is accepted."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvscope_telemetry.alarms.rules import DEFAULT_RULES, KINDS, Rule, checked, decode_rules, encode_rules
from kvscope_telemetry.errors import BadInput


def test_back_and_forth() -> None:
    changed = tuple(replace(rule, is_on=False, seconds=7.0) for rule in DEFAULT_RULES)
    assert decode_rules(encode_rules(changed)) == changed


@pytest.mark.parametrize("text", ["", "nonsense", "{}", "[1]", "[" * 5000, '[{"kind":"of_later","threshold":1}]'])
def test_what_cannot_be_read_is_as_at_first(text: str) -> None:
    assert decode_rules(text) == DEFAULT_RULES


def test_one_that_makes_no_sense_leaves_the_others() -> None:
    mine = Rule(kind="hot", threshold=70.0, seconds=1.0)
    bad = Rule(kind="kv_usage", threshold=400.0)
    found = {rule.kind: rule for rule in decode_rules(encode_rules((bad, mine)))}
    assert found["hot"] == mine
    assert found["kv_usage"] == KINDS["kv_usage"].rule
    assert list(found) == list(KINDS)


def test_what_is_accepted() -> None:
    for rule in DEFAULT_RULES:
        assert checked(rule) == rule
    with pytest.raises(BadInput, match=r"threshold 400 of alarm 'kv_usage' is not accepted: 1 to 99\.9"):
        checked(Rule(kind="kv_usage", threshold=400.0))
    with pytest.raises(BadInput, match="seconds -1 of alarm 'hot'"):
        checked(Rule(kind="hot", threshold=80.0, seconds=-1))
    with pytest.raises(BadInput, match="threshold nan"):
        checked(Rule(kind="hot", threshold=float("nan")))
    with pytest.raises(BadInput, match="'noise' is not known: kv_usage"):
        checked(Rule(kind="noise", threshold=1.0))
