"""Figures of timelines made by hand, by vLLM's definitions; failures are counted by name and are in no figure."""

from __future__ import annotations

import pytest

from kvscope_engine.bench.serving.metrics import Metrics, Spread, metrics
from kvscope_engine.bench.serving.timeline import Timeline


def timeline(start_s: float, *times_s: float, tokens: int | None = None, end_s: float | None = None) -> Timeline:
    count = len(times_s) if tokens is None else tokens
    end = times_s[-1] if end_s is None else end_s
    return Timeline(start_s, num_prompt_tokens=10, times_s=list(times_s), end_s=end, num_output_tokens=count)


def spread(found: Metrics, name: str) -> Spread:
    one = found.spreads[name]
    assert one is not None
    return one


def test_figures_of_two_answers() -> None:
    found = metrics([timeline(0.0, 1.0, 1.5, 2.5), timeline(1.0, 1.25, 1.75)], 4.0, percentiles=(50.0, 100.0))
    assert (found.completed, found.failed) == (2, 0)
    assert (found.total_input_tokens, found.total_output_tokens) == (20, 5)
    assert found.request_throughput == 0.5
    assert found.output_throughput == 1.25
    assert found.total_token_throughput == 6.25
    assert spread(found, "ttft") == Spread(625.0, 625.0, {50.0: 625.0, 100.0: 1000.0})
    assert spread(found, "tpot") == Spread(625.0, 625.0, {50.0: 625.0, 100.0: 750.0})
    assert spread(found, "itl") == Spread(pytest.approx(2000 / 3), 500.0, {50.0: 500.0, 100.0: 1000.0})
    assert spread(found, "e2el") == Spread(1625.0, 1625.0, {50.0: 1625.0, 100.0: 2500.0})
    assert found.good is None


def test_percentiles_are_between_neighbours() -> None:
    found = metrics([timeline(0.0, float(second)) for second in range(1, 12)], 11.0)
    assert spread(found, "ttft").percentiles_ms == {90.0: pytest.approx(10_000.0), 99.0: pytest.approx(10_900.0)}


def test_pieces_of_several_tokens_count_them_all() -> None:
    found = metrics([timeline(0.0, 1.0, 2.0, tokens=5)], 2.0)
    assert found.total_output_tokens == 5
    assert spread(found, "tpot").mean_ms == 250.0
    assert spread(found, "itl").mean_ms == 1000.0


def test_tokens_without_text_take_time_too() -> None:
    found = metrics([timeline(0.0, 1.0, tokens=5, end_s=3.0), timeline(0.0, tokens=5, end_s=2.0)], 3.0)
    assert spread(found, "ttft").percentiles_ms[99.0] == pytest.approx(1990.0)
    assert spread(found, "e2el").mean_ms == 2500.0
    assert spread(found, "tpot").mean_ms == 250.0
    assert found.spreads["itl"] is None


def test_an_answer_of_one_token_has_no_time_per_token() -> None:
    found = metrics([timeline(0.0, 1.0)], 1.0, goodput_ms={"tpot": 1.0})
    assert found.spreads["tpot"] is None
    assert found.good == 1


def test_goodput_keeps_every_limit() -> None:
    timelines = [timeline(0.0, 0.1, 0.2), timeline(0.0, 0.3, 0.4), timeline(0.0, 0.1, 5.0)]
    assert metrics(timelines, 2.0, goodput_ms={"ttft": 200.0}).good == 2
    both = metrics(timelines, 2.0, goodput_ms={"ttft": 200.0, "e2el": 200.0})
    assert both.good == 1
    assert both.as_json()["request_goodput"] == 0.5


def test_failures_are_named_and_in_no_figure() -> None:
    lost = Timeline(0.0, 10, [0.5], error="hung up")
    found = metrics([timeline(0.0, 1.0), lost, lost, Timeline(0.0, 10, error="HTTP 500")], 1.0)
    assert (found.completed, found.failed) == (1, 3)
    assert found.failures == {"hung up": 2, "HTTP 500": 1}
    assert (found.total_input_tokens, found.total_output_tokens) == (10, 1)
    assert spread(found, "ttft").mean_ms == 1000.0


def test_nothing_whole_is_no_figure() -> None:
    told = metrics([Timeline(0.0, error="no")], 1.0).as_json()
    assert told["request_throughput"] == 0.0
    assert told["mean_ttft_ms"] is None
    assert told["median_e2el_ms"] is None


def test_an_end_comes_before_a_beginning() -> None:
    found = metrics([timeline(0.0, 1.0), timeline(1.0, 2.0), timeline(1.5, 3.0)], 3.0)
    assert found.max_concurrent_requests == 2


def test_names_are_those_of_vllm() -> None:
    told = metrics([timeline(0.0, 1.0, 2.0)], 2.0).as_json()
    names = {f"{stat}_{metric}_ms" for stat in ("mean", "median", "p90", "p99") for metric in ("ttft", "tpot", "itl")}
    assert names <= told.keys()
    assert {"duration", "completed", "failed", "total_input_tokens", "total_output_tokens"} <= told.keys()
    assert {"request_throughput", "output_throughput", "total_token_throughput"} <= told.keys()
