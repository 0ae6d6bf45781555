"""The GPU's benchmark runs where there is none, and says what it does not accept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvscope_engine.bench.contenders.transformers_continuous import TransformersContinuous
from kvscope_engine.bench.on_gpu.setting import LLAMA_8B
from kvscope_engine.cli.main import main

TINY = {
    "vocab_size": 5000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
}


@pytest.fixture
def on_cpu(tmp_path: Path) -> list[str]:
    """The benchmark of a tiny model with random weights."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA_8B | TINY))
    return ["bench", "gpu", "--device", "cpu", "--model", f"dummy:{config}", "--context", "40", "--steps", "4"]


def test_each_batch_has_a_step(on_cpu: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*on_cpu, "--json", "--turns", "--batch", "1", "--batch", "3"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["turns"]["overlaps"].startswith("while 0 of ")
    steps = report["graphs"]["steps"]
    assert set(steps) == {"1", "3"}
    assert all(step["step_ms"] >= step["forward_ms"] > 0.0 for step in steps.values())
    token_bytes = 2 * 2 * 2 * 16 * 2  # two layers, keys and values of two heads of 16, bfloat16
    read = report["graphs"]["read_once_bytes"]
    assert read["3"] - read["1"] == 2 * (40 + 2) * token_bytes
    assert read["1"] < report["graphs"]["weights_bytes"], "the input's embeddings are not read"


def test_requests_run_in_both_and_telemetry_in_pairs(on_cpu: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*on_cpu, "--json", "--requests", "3", "--telemetry", "--batch", "2"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert "graphs" not in report
    found = report["requests"]
    ours, theirs = found["kvscope"], found["transformers"]
    assert ours["tokens"] == theirs["tokens"] == found["output_tokens"] > 0
    assert not theirs["is_stopped"]
    assert found["ours_over_theirs"] == pytest.approx(theirs["seconds"] / ours["seconds"])
    assert found["failed"] == []
    steps = report["telemetry"]["batches"]["2"]
    assert len(steps["pairs"]) == 5
    assert steps["ratio"] == steps["with_ms"] / steps["without_ms"] > 0.0


def test_ours_is_told_where_transformers_fails(
    on_cpu: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def session(self: object, workload: object) -> None:
        raise RuntimeError("no room for a cache\nand more about it")

    monkeypatch.setattr(TransformersContinuous, "session", session)
    assert main([*on_cpu, "--requests", "1"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert any(line.startswith("kvscope ") for line in told)
    assert told[-1] == "transformers failed: RuntimeError: no room for a cache"


@pytest.mark.parametrize(
    "option",
    [["--requests", "0"], ["--limit", "nan"], ["--steps", "0"], ["--batch", "0"], ["--gpu-memory-utilization", "1.5"]],
)
def test_what_is_not_accepted_is_said(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gpu", "--device", "cpu", *option]) == 2
    assert option[0] in capsys.readouterr().err
