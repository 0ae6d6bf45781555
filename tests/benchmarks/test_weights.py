"""The table of quantization formats measures each format, and all differ."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import weights
from kvscope_telemetry.errors import BadInput


def test_weights_benchmark_measures_perplexity_and_size_of_each_quantization_format(
    tiny_model: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(weights, "text_ids", lambda loaded, most: list(range(3, 3 + most)))
    options: dict[str, Any] = {"model": tiny_model(), "device": "cpu", "dtype": "float32", "tokens": 60}
    assert weights.run(argparse.Namespace(**options, json=True)) == 0
    rows = json.loads(capsys.readouterr().out)["formats"]
    assert list(rows) == list(weights.FORMATS)
    assert len({row["perplexity"] for row in rows.values()}) == len(rows)
    assert rows["int4"]["weights_bytes"] < rows["fp8"]["weights_bytes"] < rows["none"]["weights_bytes"]
    assert weights.run(argparse.Namespace(**options, json=False)) == 0
    assert "--quantization" in capsys.readouterr().out


def test_weights_benchmark_refuses_a_single_token() -> None:
    with pytest.raises(BadInput, match="--tokens 1 is not accepted"):
        weights.run(argparse.Namespace(tokens=1))
