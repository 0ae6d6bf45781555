"""Alarm rules: parsing, text and validation."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvscope_telemetry.alarms.alarm_figures import SECOND_FIGURES
from kvscope_telemetry.alarms.rules import (
    DEFAULT_RULES,
    Rule,
    checked,
    describe_rule,
    parse_rule,
    rule_text,
    unreported_figures,
)
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.capabilities import OWN_ENGINE, Capabilities
from kvscope_telemetry.summaries.run_figures import FIGURES

RULES = {rule.name: rule for rule in DEFAULT_RULES}


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("ttft_p99_ms > 500 for 10s", Rule(name="ttft_p99_ms > 500", expression="ttft_p99_ms > 500", seconds=10)),
        ("Slow:  ttft_p99_ms >  500", Rule(name="Slow", expression="ttft_p99_ms > 500")),
        ("a b: running > 8 for 1.5 min", Rule(name="a b", expression="running > 8", seconds=90)),
        ("x:mean(running, 5) > 8 for 2 s", Rule(name="x", expression="mean(running, 5) > 8", seconds=2)),
    ],
)
def test_rule_is_parsed_from_a_line(line: str, rule: Rule) -> None:
    assert parse_rule(line) == rule


def test_text_of_an_alarm_rule_contains_name_expression_and_duration() -> None:
    assert rule_text(RULES["KV usage high"]) == "KV usage high: kv_usage > 0.95 for 5 s"
    assert rule_text(RULES["Long wait"]) == "Long wait: longest_wait_s > 10"
    assert rule_text(parse_rule("running > 8 for 2 min")) == "running > 8 for 120 s"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("longest_wait_s > 10", "longest wait of a request for its first step > 10 s"),
        ("a: kv_usage > 0.95 for 5 s", "share of the pool held by requests > 95.0 % for 5 s"),
        ("free_blocks < 8", "free blocks < 8"),
        ("mean(preemptions_per_s, 5) > 1", "mean(preemptions per second, 5) > 1"),
    ],
)
def test_rule_description_uses_no_figure_names(line: str, words: str) -> None:
    assert describe_rule(parse_rule(line)) == words


@pytest.mark.parametrize(
    ("line", "why_not"),
    [
        ("running > 8 for ten s", "'for' cannot be read here"),
        ("running > 8 for 1.2.3 s", "'1.2.3' is not accepted: must be a number of seconds"),
        ("running > 8 for 4000 s", "4000 seconds are not accepted: 0 to 3600"),
        ("note: running > 8", "the name 'note' is not accepted"),
        ("a: b: running > 8", "':' cannot be read here"),
        (f"{'x' * 61}: running > 8", "up to 60 characters"),
        ("", "an expression is needed"),
    ],
)
def test_invalid_rule_line_is_refused_with_its_reason(line: str, why_not: str) -> None:
    with pytest.raises(BadInput) as refused:
        parse_rule(line)
    assert why_not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_rule_set_with_duplicate_or_invalid_rules_is_refused() -> None:
    assert checked(DEFAULT_RULES) == DEFAULT_RULES
    with pytest.raises(BadInput, match="alarm 'Long wait': there are two of this name"):
        checked([RULES["Long wait"], replace(RULES["Engine stuck"], name="Long wait")])
    with pytest.raises(BadInput, match="alarm 'Long wait': 'noise' is not a figure"):
        checked([replace(RULES["Long wait"], expression="noise > 3")])
    with pytest.raises(BadInput, match="alarm ' ': a name is needed"):
        checked([replace(RULES["Long wait"], name=" ")])
    with pytest.raises(BadInput, match="nan seconds"):
        checked([replace(RULES["Long wait"], seconds=float("nan"))])


def test_figures_that_an_engine_does_not_report_are_listed() -> None:
    little = Capabilities(engine="vllm", free_rows=False, requests=False, steps=False)
    reasons = {name: unreported_figures(rule, little) for name, rule in RULES.items()}
    assert reasons["KV usage high"] == reasons["Many preemptions"] == reasons["Frames lost"] == ()
    assert reasons["Blocks run out"] == ("blocks_run_out_s",)
    assert reasons["Long wait"] == ("longest_wait_s",)
    assert reasons["Engine stuck"] == ("stalled_s",)
    assert not any(unreported_figures(rule, OWN_ENGINE) for rule in DEFAULT_RULES)


def test_each_run_figure_with_an_alarm_group_is_an_alarm_figure() -> None:
    columns = {column for figure in SECOND_FIGURES.values() for column in figure.columns}
    offered = [figure for figure in FIGURES if figure.uses.alarms]
    assert len(offered) > 10
    assert [one.key for one in offered if one.key not in SECOND_FIGURES and one.column not in columns] == []
