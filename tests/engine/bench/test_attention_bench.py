"""Attention methods of the laboratory: exact ones agree, sparse ones read what they claim; and the benchmark from end
to end.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvscope_engine.bench import attention
from kvscope_engine.bench.laboratory.measuring import workspace_bytes
from kvscope_engine.bench.laboratory.methods import EXACT, FULL, METHODS, Contiguous
from kvscope_engine.bench.laboratory.sparse import Hierarchical, LargestBound, Oracle, Sparse
from kvscope_engine.cli.main import main
from kvscope_telemetry.errors import BadInput


@pytest.fixture(scope="module")
def layer() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of 2 requests with 6 query heads, 2 KV heads and 150 tokens, not a multiple of the
    block size.
    """
    draw = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(2, 150, 2, 32, generator=draw) for _ in range(2))
    return torch.randn(2, 6, 32, generator=draw), keys, values


def attended(name_or_method: Any, layer: tuple[torch.Tensor, ...]) -> torch.Tensor:
    method = METHODS[name_or_method]() if isinstance(name_or_method, str) else name_or_method
    query, keys, values = layer
    method.store_kv(keys, values)
    assert method.stored_bytes > 0
    found: torch.Tensor = method.attend(query)
    return found


@pytest.mark.parametrize("name", METHODS)
def test_exact_attention_methods_equal_full_attention_and_sparse_ones_differ(name: str, layer: Any) -> None:
    expected, found = attended(FULL, layer), attended(name, layer)
    assert found.shape == expected.shape
    assert torch.isfinite(found).all()
    assert torch.allclose(found, expected, atol=1e-5) == (name in EXACT)


@pytest.mark.parametrize("make", [Sparse, Hierarchical, LargestBound, Oracle])
def test_block_with_nearly_all_attention_is_selected(make: Any, layer: Any) -> None:
    """All heads look for one key among many."""
    query, keys, values = (each.clone() for each in layer)
    keys[:, 37] = 40 * query.view(2, 2, 3, 32).mean(2)
    keys[:, 37] += 0.1
    query = query.view(2, 2, 3, 32).mean(2, keepdim=True).expand(2, 2, 3, 32).reshape(2, 6, 32)
    expected = attended(FULL, (query, keys, values))
    assert torch.allclose(attended(make(0.2), (query, keys, values)), expected, atol=1e-3)


def test_no_ranking_keeps_more_attention_than_the_oracle(layer: Any) -> None:
    query, keys, values = layer
    rows = query.view(2, 2, 3, 32)
    weights = (rows @ keys.permute(0, 2, 3, 1) * 32**-0.5).softmax(-1).sum(2)
    by_block = torch.nn.functional.pad(weights, (0, 10)).unflatten(-1, (-1, 16)).sum(-1)
    kept = {}
    for make in (Sparse, Oracle, LargestBound):
        method = make(0.4)
        method.store_kv(keys, values)
        kept[make] = by_block.gather(2, method._select_blocks(rows)).sum(2)
    assert (kept[Oracle] >= kept[Sparse] - 1e-5).all()
    assert (kept[Oracle] >= kept[LargestBound] - 1e-5).all()
    assert (kept[Oracle] > kept[Sparse] + 1e-3).any()


def test_workspace_counts_new_tensors_only() -> None:
    there = torch.zeros(1 << 16)
    assert workspace_bytes(lambda: there.view(2, -1)) == 0
    assert workspace_bytes(lambda: (there + 1, there + 2, there + 3)) == 3 * there.nbytes


def test_perplexity_with_full_attention_equals_the_model(tiny_model: Callable[..., str]) -> None:
    from kvscope_engine.bench.laboratory.captured import DenseContext, capture_text, perplexity_after
    from kvscope_engine.model.layers.forward import Forward
    from kvscope_engine.model.loader.model_loader import load_model
    from kvscope_telemetry.engine_config import EngineConfig

    loaded = load_model(EngineConfig(model=tiny_model(), device="cpu", dtype="float32"), lambda _: None)
    ids = [(7 * place) % 250 + 3 for place in range(90)]
    context = capture_text(loaded, ids, lambda _: None)
    found = perplexity_after(loaded, context, ids, 20, Contiguous)
    with torch.inference_mode():
        logits = Forward(loaded.module).logits(torch.tensor(ids), torch.arange(90), DenseContext())
    logprobs = logits[70:89].log_softmax(-1).gather(1, torch.tensor(ids[71:])[:, None])
    assert found == pytest.approx(float((-logprobs.mean()).exp()), rel=1e-4)


def test_attention_benchmark_writes_a_report_with_every_section_and_figure(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    tiny_model: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "text_ids", lambda loaded, count, path: [7 * n % 250 + 3 for n in range(count)])
    monkeypatch.setattr(attention, "HEAT_STEPS", 6)
    options = [
        "--model",
        tiny_model(num_hidden_layers=3),
        "--dtype",
        "float32",
        "--lengths",
        "64,80",
        "--batch",
        "2",
        "--layers",
        "2",
        "--repeats",
        "1",
        "--scored",
        "2",
    ]
    report_path = tmp_path / "report.html"
    assert main(["bench", "attention", *options, "--page-heat", "8", "--html", str(report_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    rows = report["rows"]
    assert [(row["method"], row["length"]) for row in rows] == [(n, length) for length in (64, 80) for n in METHODS]
    by_name = {row["method"]: row for row in rows if row["length"] == 64}
    assert by_name["sparse 1"]["perplexity_change"] == pytest.approx(0.0, abs=0.05)
    assert by_name["low rank 1/4"]["perplexity"] is None
    assert by_name["window 1/4"]["kv_bytes_per_token"] < by_name[FULL]["kv_bytes_per_token"] / 2
    assert [row["fraction"] for row in report["sparse_decode"]] == [1.0, 0.5, 0.25, 0.125]
    assert all(row["perplexity_change"] == 0.0 for row in report["sparse_decode"]), "64 tokens are read in full"
    assert report["page_heat"]["every"] == 8
    assert report["page_heat"]["measured_step_ms"] > 0
    page = report_path.read_text("utf-8")
    assert "Ways to attend" in page
    assert "What --sparse-decode does" in page
    assert page.count("<svg") == 9, "five figures, plus four for the run without perplexity"


@pytest.mark.parametrize(
    "options",
    [
        ["--lengths", "10"],
        ["--lengths", "a"],
        ["--batch", "0"],
        ["--scored", "1"],
        ["--lengths", "64", "--scored", "60"],
    ],
)
def test_attention_benchmark_refuses_an_invalid_option(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "attention", *options]) == 2
    assert "is not accepted" in capsys.readouterr().err


@pytest.mark.parametrize(("content", "words"), [(None, "No such file"), (b"", "no text in it"), (b"\xff\xfe", "UTF-8")])
def test_invalid_text_file_is_refused(content: bytes | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    tokenizer = SimpleNamespace(encode=lambda text: list(text.encode()))
    with pytest.raises(BadInput, match=words):
        attention.text_ids(SimpleNamespace(tokenizer=tokenizer), 10, str(path))  # type: ignore[arg-type]


def test_sparse_decode_changes_perplexity(tiny_model: Callable[..., str]) -> None:
    """At least 16 of 27 blocks are read."""
    from kvscope_engine.bench.laboratory.sparse_quality import sparse_quality
    from kvscope_engine.model.loader.model_loader import load_model
    from kvscope_telemetry.engine_config import EngineConfig

    name = tiny_model(num_hidden_layers=3)
    loaded = load_model(EngineConfig(model=name, device="cpu", dtype="float32"), lambda _: None)
    ids = [(7 * place) % 250 + 3 for place in range(420)]
    full, half = sparse_quality(loaded, ids, 8, lambda _: None, (1.0, 0.5))
    assert (full["num_attended_blocks"], half["num_attended_blocks"]) == (27, 16)
    assert full["perplexity_change"] == full["perplexity_error"] == full["divergence"] == 0.0
    assert half["perplexity"] == pytest.approx(full["perplexity"] * (1.0 + half["perplexity_change"]))
    assert half["perplexity_change"] != 0.0
    assert half["perplexity_error"] is not None
    assert half["perplexity_error"] > 0.0
    assert half["divergence"] > 0.0
