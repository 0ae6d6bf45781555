"""`bench reuse` in small: what it says was computed or read back was, and bad sizes are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvscope_engine.bench import reuse
from kvscope_engine.bench.reuse_cases import preemption
from kvscope_engine.bench.reuse_cases.probe import Probe, Took
from kvscope_engine.bench.reuse_cases.sizes import with_bounce
from kvscope_engine.bench.reuse_cases.spent import Spent, summary
from kvscope_engine.cli.main import main
from kvscope_engine.policy.tiers.lower_tiers import LowerTiers, num_bounce
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.errors import KvscopeError

SMALL = ["--prefix-tokens", "70", "--own-tokens", "5", "--preempted-tokens", "60", "--prompt-tokens", "30"]


@pytest.fixture
def bench_reuse(
    tiny_model: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[str]]:
    """The words of the command on a tiny model, whose prompts are so cheap that loading is always told to be so too."""
    monkeypatch.setenv("KVSCOPE_CACHE", str(tmp_path))
    monkeypatch.setattr(LowerTiers, "load_seconds", lambda *_: 0.0)
    sizes = ["--repeats", "1", "--completions", "3", "--num-threads", "1", *SMALL]
    return lambda *more: ["bench", "reuse", "--model", tiny_model(), "--device", "cpu", *sizes, *more]


def test_json_has_every_way(bench_reuse: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(bench_reuse("--json", "--dtype", "float32")) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert (run["dtype"], run["device"], run["num_threads"], run["rounds"]) == ("float32", "cpu", 1, 1)
    assert set(run["prefix"]["first_token"]) == {"new", "in the pool", "in host memory", "on disk"}
    assert set(run["preemption"]["next_token"]) == {"computed again", "from host memory", "from disk"}
    # Who asks for three completions at once computes the prompt once, and its last token for the other two again.
    assert run["completions"]["computed_prompt_tokens"] == {"a request each": 90, "one request": 32}
    ways = [way for case in ("prefix", "preemption") for part in _medians(run[case]) for way in part.values()]
    assert all(number > 0 for way in ways for number in way.values())


def test_a_table_for_people(bench_reuse: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(bench_reuse("--only", "preemption", "--only", "completions", "--dtype", "bfloat16")) == 0
    text = capsys.readouterr().out
    assert "bfloat16, cpu, 1 thread, 1 round\n" in text
    assert "next token, preempted with 60 tokens in 4 blocks" in text
    assert "one request: 32 tokens computed" in text
    assert "first token" not in text.replace("last first token", "")


def test_several_dtypes_are_told_one_after_the_other(
    bench_reuse: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    dtypes = ("--dtype", "bfloat16", "--dtype", "float32")
    assert main(bench_reuse("--json", "--only", "completions", *dtypes)) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [run["dtype"] for run in runs] == ["bfloat16", "float32"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("repeats", "0"),
        ("prefix-tokens", "15"),
        ("own-tokens", "0"),
        ("preempted-tokens", "17"),
        ("prompt-tokens", "0"),
        ("completions", "1"),
        ("num-threads", "0"),
    ],
)
def test_what_makes_no_sense_is_refused(
    bench_reuse: Callable[..., list[str]], capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    assert main(bench_reuse("--only", "preemption", f"--{option}", value)) == 2
    assert f"--{option} {value} is not accepted: at least" in capsys.readouterr().err


@pytest.mark.parametrize("num_tokens", [18, 31, 32, 33, 60])
def test_the_victim_is_preempted_with_exactly_the_tokens_asked_for(
    tiny_model: Callable[..., str], num_tokens: int
) -> None:
    shape = preemption.Shape(num_tokens)
    config = EngineConfig(
        model=tiny_model(), device="cpu", num_gpu_blocks_override=shape.pool_blocks, enable_prefix_caching=False
    )
    with Probe(config) as probe:
        victim, _ = preemption._preempt_one(probe, shape, priority=0)
        (request,) = (one for one in probe.engine.components.scheduler.requests.values() if one.request_id == victim)
        assert request.num_tokens == num_tokens + 1, "computed are all but the one said last"
        assert request.num_preemptions == 1


@pytest.mark.parametrize("num_tokens", [1000, 1600, 16_000, 32_000])
def test_the_pool_has_the_watermark_to_spare(num_tokens: int) -> None:
    shape = preemption.Shape(num_tokens)
    assert shape.spare_blocks == max(1, shape.pool_blocks // 100)


@pytest.mark.parametrize("count", [1, 2, 63, 64, 200, 5000, 40_000])
def test_host_places_beside_those_for_the_way_up(count: int) -> None:
    assert with_bounce(count) - num_bounce(with_bounce(count)) == count


def test_a_measurement_of_something_else_is_an_error(tiny_model: Callable[..., str]) -> None:
    with Probe(EngineConfig(model=tiny_model(), device="cpu", num_gpu_blocks_override=8)) as probe:
        prompt = probe.ids(40)
        took = Took(probe)
        probe.first_token(prompt)
        took.expect("new", computed=40)
        took = Took(probe)
        probe.first_token(prompt)
        took.expect("cached", computed=8)
        with pytest.raises(KvscopeError, match="from disk: 8 prompt tokens were computed and 0 blocks loaded"):
            took.expect("from disk", computed=8, loaded=2, risen=2)


def test_who_waits_for_nobody_is_told(tiny_model: Callable[..., str]) -> None:
    with (
        Probe(EngineConfig(model=tiny_model(), device="cpu", num_gpu_blocks_override=8)) as probe,
        pytest.raises(KvscopeError, match="waits for a token that nobody will say"),
    ):
        probe.token_of("1")


def test_ratios_are_within_a_round() -> None:
    rounds = {"slow": [Spent(2.0, 1.0), Spent(30.0, 6.0), Spent(4.0, 4.0)], "fast": [Spent(1.0, 1.0)] * 3}
    found = summary(rounds, "slow")
    assert found["slow"] == {"wall_s": 4.0, "cpu_s": 4.0, "wall_ratio": 1.0, "cpu_ratio": 1.0}
    assert found["fast"] == {"wall_s": 1.0, "cpu_s": 1.0, "wall_ratio": 4.0, "cpu_ratio": 4.0}


def test_the_parts_offered_are_those_told() -> None:
    assert tuple(reuse.TEXTS) == reuse.CASES


def _medians(case: dict[str, Any]) -> list[dict[str, dict[str, float]]]:
    return [part for name, part in case.items() if name.endswith("_token")]
