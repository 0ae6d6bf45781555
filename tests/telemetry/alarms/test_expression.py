"""Alarm expressions: values, unknown values, and the error messages of rejected expressions."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvscope_telemetry.alarms.alarm_figures import SECOND_FIGURES, value_text
from kvscope_telemetry.alarms.expression import Expression
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.telemetry import Stop
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.summaries.summary import SECOND_NS, Latency, Summary

START_NS = 1_700_000_000 * SECOND_NS


def overview_of(*seconds: dict[str, Any]) -> SessionOverview:
    overview = SessionOverview()
    overview.extend(
        Summary(**{"time_ns": START_NS + s * SECOND_NS, "epoch": 1, **each}) for s, each in enumerate(seconds)
    )
    return overview


def holds(text: str, slack: float = 0.0, **second: Any) -> bool | None:
    """Return whether the expression holds in one second, or None if that is unknown."""
    (found,) = Expression(text).evaluate(overview_of(second), slice(0, 1), slack).tolist()
    return None if math.isnan(found) else bool(found)


SECOND: dict[str, Any] = {
    "num_running": 9,
    "num_waiting": 2,
    "active_blocks": 960,
    "free_blocks": 40,
    "first_token": Latency(count=3, p50_s=0.1, p95_s=0.4, p99_s=0.7),
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("free_blocks < 0.05 * num_blocks and running > 8", True),
        ("free_blocks < 0.05 * num_blocks and running > 9", False),
        ("kv_usage >= 0.96", True),
        ("ttft_p99_ms > 500", True),
        ("not ttft_p95_ms > 500", True),
        ("0.2 < kv_usage < 0.5 or waiting == 2", True),
        ("max(running, waiting, 12) == 12", True),
        ("min(running, waiting) != abs(-2)", False),
        ("running / waiting - 0.5 <= 4", True),
        ("-running < +waiting", True),
        ("running\n  > 8", True),
    ],
)
def test_alarm_expression_of_known_figures_is_true_or_false_as_expected(text: str, expected: bool) -> None:
    assert holds(text, **SECOND) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("temperature_celsius > 80", None),
        ("not temperature_celsius > 80", None),
        ("temperature_celsius > 80 and running > 8", None),
        ("temperature_celsius > 80 and running > 100", False),
        ("temperature_celsius > 80 or running > 8", True),
        ("temperature_celsius > 80 or running > 100", None),
        ("max(temperature_celsius, running) > 8", None),
        ("temperature_celsius != temperature_celsius", None),
        ("running / (waiting - 2) > 0", None),
        ("queue_p50_ms < 100", None),
        ("hit_rate < 0.5", None),
        ("sum(temperature_celsius, 10) > 0", None),
    ],
)
def test_alarm_expression_is_unknown_only_if_unknown_figures_decide_its_result(
    text: str, expected: bool | None
) -> None:
    assert holds(text, **SECOND) is expected


def test_histogram_latency_alarm_needs_both_bucket_bounds_above_the_threshold() -> None:
    """The p99 lies in the bucket from 250 ms to 500 ms."""
    latencies = {"first_token": Latency(count=3, p99_s=0.5, p99_above_s=0.25)}
    assert holds("ttft_p99_ms > 500", **latencies) is False
    assert holds("ttft_p99_ms > 300", **latencies) is None
    assert holds("ttft_p99_ms > 250", **latencies) is True
    assert holds("ttft_p99_ms < 300", **latencies) is None
    endless = {"first_token": Latency(count=3, p99_s=-1.0, p99_above_s=80.0)}
    assert holds("ttft_p99_ms > 500", **endless) is True


def test_alarm_expression_holds_if_its_figure_is_within_the_slack_of_the_threshold() -> None:
    assert [holds("kv_usage > 1", slack, **SECOND) for slack in (0.0, 0.05)] == [False, True]
    assert [holds("running < 9", slack, **SECOND) for slack in (0.0, 0.05)] == [False, True]
    assert [holds("not running >= 9", slack, **SECOND) for slack in (0.0, 0.05)] == [False, True]
    assert [holds("not running == 9", slack, **SECOND) for slack in (0.0, 0.05)] == [False, False]


def test_mean_and_sum_in_an_alarm_expression_cover_the_last_known_seconds() -> None:
    overview = overview_of(*({"preemptions": count} for count in (0, 0, 6, 0, 0, 0, 1)))
    everything = slice(0, 7)
    assert Expression("sum(preemptions_per_s, 3) > 5").evaluate(overview, everything).tolist() == [0, 0, 1, 1, 1, 0, 0]
    means = Expression("mean(preemptions_per_s, 3) > 0").value(overview, everything).tolist()
    assert [None if math.isnan(mean) else mean for mean in means] == [None, None, 2, 2, 2, 0, 1 / 3]
    assert Expression("mean(preemptions_per_s, 3) > 0").value(overview, slice(4, 6)).tolist() == [2, 0]


def test_mean_and_sum_do_not_cross_an_engine_restart() -> None:
    overview = overview_of(*({"preemptions": 1, "epoch": 1 if s < 5 else 2} for s in range(10)))
    assert Expression("sum(preemptions_per_s, 4) > 0").value(overview, slice(0, 10)).tolist() == [1, 2, 3, 4, 4] * 2


def test_engine_figures_are_unknown_while_the_engine_is_paused() -> None:
    stop = {"stops": (Stop(begin_ns=START_NS, end_ns=START_NS + SECOND_NS // 2),)}
    for text in ("running > 8", "mean(running, 1) > 8", "sum(running, 5) > 8"):
        assert holds(text, **SECOND) is True
        assert holds(text, **SECOND, **stop) is None
    assert holds("power_watts > 8", power_watts=100.0, **stop) is True


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("ttft_p99_ms > 500", "700 ms"),
        ("500 < ttft_p99_ms and running > 3", "700 ms"),
        ("kv_usage > 0.95", "96.0 %"),
        ("free_blocks < 0.05 * num_blocks", "40 blocks"),
        ("running + waiting > 3", "11"),
        ("running / 2 > 3", "4.5"),
    ],
)
def test_alarm_expression_is_shown_with_the_unit_of_its_figure(text: str, value: str) -> None:
    expression = Expression(text)
    (found,) = expression.value(overview_of(SECOND), slice(0, 1)).tolist()
    assert value_text(found, expression.unit) == value


def test_expression_knows_whether_a_higher_value_is_worse() -> None:
    assert Expression("running > 3").rises
    assert Expression("3 < running").rises
    assert not Expression("free_blocks < 0.05 * num_blocks and running > 8").rises


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("ttft_p99 > 500", "'ttft_p99' is not a figure (did you mean ttft_p99_ms?); accepted: kv_usage, "),
        ("running > eight", "'eight' is not a figure"),
        ("pow(running, 2) > 3", "'pow' is not a function; accepted: min, max, abs, mean, sum"),
        ("__import__('os').system('x') > 1", "is not a function; accepted: min, max, abs"),
        ("running.real > 3", "'running.real' is not accepted"),
        ("running > '3'", "\"'3'\" is not accepted"),
        ("running > True", "'True' is not accepted"),
        ("running ** 2 > 3", "'**' is not accepted; accepted: + - * /"),
        ("running in (1, 2)", "'in' is not accepted; accepted: <, <="),
        ("running is 3", "'is' is not accepted; accepted: <, <="),
        ("running = 3", "'=' cannot be read here"),
        ("running && waiting", "'&&' cannot be read here"),
        ("running > 10s", "'10s' cannot be read here"),
        ("running >", "it ends too early"),
        ("mean(running, 5", "'(' is not closed"),
        ("free_blocks", "'free_blocks' is a number; a comparison is needed, such as free_blocks > 100"),
        ("(running > 3) + 1 > 2", "'running > 3' is a condition; a number is needed there"),
        ("2 > 1", "'2 > 1' names no figure; accepted: kv_usage"),
        ("mean(running) > 3", "accepted: mean(a, 10)"),
        ("mean(running, waiting) > 3", "'waiting' is not accepted in mean(); accepted: 1 to 600 seconds"),
        ("max(*running) > 3", "accepted"),
        ("max > 3", "'max' needs brackets, such as max(a, b)"),
        ("[running for running in waiting] > 3", "is not accepted"),
        ("lambda: running > 3", "is not accepted"),
        ("running > 1" + "0" * 400, "is not accepted"),
        ("-" * 100 + "running > 3", "at most 40 levels are accepted"),
        ("running > 3" + " or running > 3" * 50, "at most 500"),
        ("\0", "accepted"),
    ],
)
def test_invalid_expression_is_refused_with_its_reason(text: str, word: str) -> None:
    with pytest.raises(BadInput) as refused:
        Expression(text)
    assert word in str(refused.value)
    assert "\n" not in str(refused.value)


@given(
    st.lists(
        st.sampled_from(
            [
                *list(SECOND_FIGURES)[:4],
                *"()<>=+-*/,.'[]{}:;@!~%&|",
                " and ",
                " or ",
                " not ",
                "1",
                "9e9",
                "mean",
                "max",
            ]
        ),
        max_size=14,
    )
)
def test_any_text_is_either_parsed_or_refused(words: list[str]) -> None:
    try:
        expression = Expression("".join(words))
    except BadInput:
        return
    (found,) = expression.evaluate(overview_of(SECOND), slice(0, 1)).tolist()
    assert found in (0.0, 1.0) or math.isnan(found)


@pytest.mark.parametrize("name", SECOND_FIGURES)
def test_every_figure_can_be_used_and_is_documented(name: str) -> None:
    overview = overview_of(SECOND, SECOND, {})
    assert Expression(f"{name} > 3").value(overview, slice(0, 3)).shape == (3,)
    docs = Path(__file__).parents[3] / "docs" / "alarms.md"
    assert f"| `{name}` | {SECOND_FIGURES[name].label} |" in docs.read_text(encoding="utf-8")
