"""Alarm rules: a name, an expression, and for how long it must hold.

Owns the default rules, the validation of rules, and their one-line text format. Evaluation is in `alarm_engine`, the
expression language in `expression`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Final

import msgspec

from kvscope_telemetry.alarms.alarm_figures import SECOND_FIGURES, value_text
from kvscope_telemetry.alarms.expression import expression_of
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.capabilities import Capabilities
from kvscope_telemetry.summaries.bookmark import NOTE

MAX_SECONDS: Final = 3600.0
MAX_NAME: Final = 60
MAX_RULES: Final = 100
_LINE: Final = re.compile(r"(?:(?P<name>[^:]*):)?(?P<expression>.*?)(?:\s+for\s+(?P<number>[\d.]+)\s*(?P<unit>s|min))?")
_FIGURE: Final = re.compile(r"[a-z]\w*")
_PLAIN: Final = re.compile(r"[a-z]\w* *[<>]=? *(?P<number>\d+(\.\d+)?)")
_UNITS: Final = {"s": 1.0, "min": 60.0}


class Rule(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    name: str
    expression: str
    seconds: float = 0.0
    """Seconds for which the expression must hold before the alarm fires; with 0 it fires in the first second."""
    is_on: bool = True


DEFAULT_RULES: Final = (
    Rule(name="KV usage high", expression="kv_usage > 0.95", seconds=5.0),
    Rule(name="Many preemptions", expression="mean(preemptions_per_s, 5) > 1"),
    Rule(name="Long wait", expression="longest_wait_s > 10"),
    Rule(name="Blocks run out", expression="blocks_run_out_s < 30", seconds=5.0),
    Rule(name="Temperature high", expression="temperature_celsius > 85", seconds=10.0),
    Rule(name="Frames lost", expression="sum(lost_frames, 10) > 0"),
    Rule(name="Engine stuck", expression="stalled_s > 30", seconds=2.0),
)


def checked(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Return the rules as a tuple. Raises BadInput if a rule is invalid, two have the same name, or there are more than
    `MAX_RULES`.
    """
    rules_by_name: dict[str, Rule] = {}
    for rule in rules:
        error = rule_error(rule)
        if error:
            raise BadInput(f"alarm {rule.name!r:.80}: {error}")
        if rule.name in rules_by_name:
            raise BadInput(f"alarm {rule.name!r:.80}: there are two of this name; each needs its own")
        rules_by_name[rule.name] = rule
    if len(rules_by_name) > MAX_RULES:
        raise BadInput(f"{len(rules_by_name)} alarms are not accepted: at most {MAX_RULES}")
    return tuple(rules_by_name.values())


def rule_error(rule: Rule) -> str:
    """Return the reason why a rule is invalid, in one line; empty for a valid rule."""
    if not rule.name.strip():
        return "a name is needed"
    if rule.name == NOTE or len(rule.name) > MAX_NAME:
        return f"the name {rule.name!r:.80} is not accepted: up to {MAX_NAME} characters, and not {NOTE!r}"
    if not (math.isfinite(rule.seconds) and 0 <= rule.seconds <= MAX_SECONDS):
        return f"{rule.seconds:g} seconds are not accepted: 0 to {MAX_SECONDS:g}"
    try:
        expression_of(rule.expression)
    except BadInput as error:
        return str(error)
    return ""


def parse_rule(text: str) -> Rule:
    """Parse `[NAME:] EXPRESSION [for N s]`, where the unit may also be `min`. Without a name, the text of the
    expression is the name. Raises BadInput if the rule is invalid.
    """
    match = _LINE.fullmatch(" ".join(text.split()))
    assert match is not None, "each part of a line may be missing"
    expression = match["expression"].strip()
    name = (match["name"] or "").strip() or (expression if len(expression) <= MAX_NAME else f"{expression[:59]}…")
    try:
        seconds = float(match["number"] or 0) * _UNITS[match["unit"] or "s"]
    except ValueError:
        raise BadInput(f"{match['number']!r} is not accepted: must be a number of seconds, such as for 10 s") from None
    expression_of(expression)
    return checked([Rule(name=name, expression=expression, seconds=seconds)])[0]


def rule_text(rule: Rule) -> str:
    """Format a rule as `parse_rule` reads it: `KV usage high: kv_usage > 0.95 for 5 s`."""
    name = "" if rule.name == rule.expression else f"{rule.name}: "
    return f"{name}{rule.expression}" + (f" for {rule.seconds:g} s" if rule.seconds else "")


def describe_rule(rule: Rule) -> str:
    """Describe the condition of a valid rule with the labels of its figures, such as `longest wait of a request
    for its first step > 10 s`.
    """
    expression = expression_of(rule.expression)
    text = _FIGURE.sub(_figure_name, expression.text)
    plain = _PLAIN.fullmatch(expression.text)
    if plain is not None:
        unit = "" if expression.unit in ("blocks", "requests", "frames") else expression.unit
        text = text.removesuffix(plain["number"]) + value_text(float(plain["number"]), unit)
    return text + (f" for {rule.seconds:g} s" if rule.seconds else "")


def _figure_name(name: re.Match[str]) -> str:
    figure = SECOND_FIGURES.get(name[0])
    return name[0] if figure is None else f"{figure.label[0].lower()}{figure.label[1:]}".removesuffix(", 0 to 1")


def unreported_figures(rule: Rule, capabilities: Capabilities) -> tuple[str, ...]:
    """Return the names of the figures in a valid rule that an engine with these capabilities does not report."""
    figures = expression_of(rule.expression).figures
    return tuple(figure.name for figure in figures if not figure.is_available(capabilities))
