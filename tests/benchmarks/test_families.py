"""Tests of the benchmark of model families: the engine serves every shape, and a step is timed against transformers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import families
from benchmarks.command_line import run_benchmark
from benchmarks.families import FAMILIES, family_config
from kvscope_engine.model.loader.supported_models import blueprint


@pytest.mark.parametrize("family", FAMILIES)
def test_benchmark_model_of_each_family_is_accepted_and_has_10_to_150_million_parameters(family: str) -> None:
    assert 10e6 < blueprint(family_config(family), family).num_parameters < 150e6


def main(words: list[str]) -> int:
    return run_benchmark(families.__doc__, families.add_arguments, families.run, words)


def test_command_prints_times_and_refuses_invalid_repeats(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny: dict[str, Any] = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    tiny |= {"num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 64}
    monkeypatch.setitem(FAMILIES, "llama", FAMILIES["llama"] | tiny)
    monkeypatch.setattr(families, "TURN_STEPS", 2)
    words = ["--only", "llama", "--requests", "2", "--context", "20", "--repeats", "2"]
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    found = report["families"]["llama"]["2"]
    assert min(found["ours_ms"], found["transformers_ms"], found["ours_over_it"]) > 0
    assert main(words) == 0
    assert "2 at once: ours" in capsys.readouterr().out
    assert main([*words, "--repeats", "0"]) == 2
    assert "must be 1 or more" in capsys.readouterr().err
