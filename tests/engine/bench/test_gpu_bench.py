"""The GPU's benchmark runs where there is none, and says what it does not accept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvscope_engine.bench.gpu import LLAMA_8B
from kvscope_engine.cli.main import main

TINY = {
    "vocab_size": 5000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}


def test_each_batch_has_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA_8B | TINY))
    options = ["--device", "cpu", "--model", f"dummy:{config}", "--context", "40", "--steps", "4", "--json", "--turns"]
    assert main(["bench", "gpu", *options, "--batch", "1", "--batch", "3"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["turns"]["overlaps"].startswith("while 0 of ")
    steps = report["graphs"]["steps"]
    assert set(steps) == {"1", "3"}
    assert all(step["step_ms"] >= step["forward_ms"] > 0.0 for step in steps.values())
    token_bytes = 2 * 2 * 2 * 16 * 2  # two layers, keys and values of two heads of 16, bfloat16
    read = report["graphs"]["read_once_bytes"]
    assert read["3"] - read["1"] == 2 * (40 + 2) * token_bytes
    assert read["1"] < report["graphs"]["weights_bytes"], "the input's embeddings are not read"


@pytest.mark.parametrize("option", [["--steps", "0"], ["--batch", "0"], ["--gpu-memory-utilization", "1.5"]])
def test_what_is_not_accepted_is_said(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gpu", "--device", "cpu", *option]) == 2
    assert option[0] in capsys.readouterr().err
