"""The benchmark of step costs times a model, fits, prints, and saves what `simulate --costs` reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import step_costs
from benchmarks.command_line import run_benchmark
from benchmarks.step_costs import Case
from kvscope_engine.simulator.costs.cost_file import load_costs


def test_step_cost_case_is_converted_to_token_context_and_pair_counts_of_the_cost_model() -> None:
    sample = Case(4, 99, 1).sample(1.0)
    assert (sample.num_tokens, sample.context, sample.pairs) == (4, 400, 400)
    sample = Case(1, 10, 3).sample(1.0)
    assert (sample.num_tokens, sample.context, sample.pairs) == (3, 13, 11 + 12 + 13)


def main(words: list[str]) -> int:
    return run_benchmark(step_costs.__doc__, step_costs.add_arguments, step_costs.run, words)


def test_model_is_measured_and_its_costs_are_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr(step_costs, "CONTEXTS", (16, 64, 1024))  # the last is longer than the model accepts
    monkeypatch.setattr(step_costs, "CHUNKS", (8, 32))
    config = tmp_path / "config.json"
    shape = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "max_position_embeddings": 128, "model_type": "llama"}
    config.write_text(json.dumps(shape | heads | {"architectures": ["LlamaForCausalLM"]}))
    path = tmp_path / "costs.json"
    words = ["--model", f"dummy:{config}", "--device", "cpu", "--repeats", "1", "--save", str(path)]
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [step["step"] for step in report["steps"]] == [
        *(f"{batch} x decode at {context}" for batch in (1, 4, 16, 64) for context in (16, 64)),
        "prefill 8 after 0",
        "prefill 32 after 0",
    ]
    assert load_costs(path).max_model_len == 128
    assert "ms a step; error" in step_costs._text(report)
    assert main(["--repeats", "0"]) == 2
    assert "repeats=0" in capsys.readouterr().err
