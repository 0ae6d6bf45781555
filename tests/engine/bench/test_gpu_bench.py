"""The GPU benchmark runs on a CPU, and refuses invalid options."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvscope_engine.bench.contenders.transformers_continuous import TransformersContinuous
from kvscope_engine.bench.on_gpu import ttft
from kvscope_engine.bench.on_gpu.decode_steps import decode_steps_text
from kvscope_engine.bench.shapes import SHAPES
from kvscope_engine.cli.main import main
from kvscope_telemetry.devices.data_sheets import DATA_SHEET_GB_PER_S

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
    """Options for the benchmark of a tiny model with random weights."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(SHAPES["8b"] | TINY))
    return ["bench", "gpu", "--device", "cpu", "--model", f"dummy:{config}", "--context", "40", "--steps", "4"]


def test_gpu_benchmark_measures_each_chosen_batch_size(on_cpu: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with_options = ["--with", "page-heat=2", "--with", 'speculative-config={"num_speculative_tokens":2}']
    assert main([*on_cpu, "--json", *with_options, "--batch", "1", "--batch", "3"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["engines"]) == {"graphs", "page-heat=2", with_options[-1]}
    found = {(row["kind"], row["batch"], row["sampling"]): row for row in report["steps"]}
    assert {key[1:] for key in found} == {(1, "greedy"), (3, "greedy"), (3, "top-p")}, "top-p for the largest alone"
    assert len(found) == 3 * 3
    assert all(row["p99_ms"] >= row["step_ms"] >= row["forward_ms"] > 0.0 for row in found.values())
    assert all(row["requests"] == row["batch"] for row in found.values())
    assert all(row["host_ms"] == pytest.approx(row["step_ms"] - row["forward_ms"]) for row in found.values())
    token_bytes = 2 * 2 * 2 * 16 * 2  # two layers, keys and values of two heads with 16 dimensions, bfloat16
    one, three = (found["graphs", batch, "greedy"]["read_once_bytes"] for batch in (1, 3))
    num_steps_before = 2 + 4 + 4  # upper bound: prefill, warm-up and measured steps
    assert 2 * 40 * token_bytes < three - one <= 2 * (40 + num_steps_before) * token_bytes
    assert one < report["engines"]["graphs"]["weights_bytes"], "the input embeddings must not count as read"


def test_only_active_experts_count_as_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    experts = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
    config.write_text(json.dumps(SHAPES["30b-a3b"] | TINY | experts))
    options = ["--model", f"dummy:{config}", "--context", "40", "--steps", "2", "--no-eager", "--sampling", "greedy"]
    assert main(["bench", "gpu", "--device", "cpu", "--json", *options, "--batch", "1", "--batch", "3"]) == 0
    one, three = json.loads(capsys.readouterr().out)["steps"]
    layer_bytes = 8 * 3 * 32 * 64 * 2  # all experts of a layer: three bfloat16 matrices each
    keys_and_values_bytes = 2 * 2 * 2 * 16 * 2 * (40 + 2 + 2 + 2)
    more = three["read_once_bytes"] - one["read_once_bytes"]
    touched = (1 - (1 - 2 / 8) ** 3) - 2 / 8  # share of experts, three tokens compared with one
    assert touched * 2 * layer_bytes < more <= touched * 2 * layer_bytes + 2 * keys_and_values_bytes


def test_batch_that_does_not_fit_the_cache_is_marked(on_cpu: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """With 9 blocks of 16, 3 requests of 40 tokens and some steps do not fit: one or two run at a time."""
    options = ["--with", "num-gpu-blocks-override=9", "--batch", "1", "--batch", "3", "--sampling", "greedy"]
    assert main([*on_cpu, *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if "greedy" in line]
    assert [row.split("  ")[0] for row in rows[:3]] == ["1", "1", "3"]
    assert re.match(r"3 \([12] at once\) +num-gpu-blocks-override=9 ", rows[3])
    assert lines[-1].startswith("N at once: the KV memory is too small for the whole batch")


def test_gpu_benchmark_measures_with_the_chosen_sampling_and_multi_turn_options(
    on_cpu: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*on_cpu, "--json", "--turns", "--sampling", "top-p", "--batch", "1"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(row["kind"], row["sampling"]) for row in report["steps"]] == [("graphs", "top-p"), ("turns", "top-p")]
    assert report["engines"]["turns"]["overlaps"].startswith("while 0 of ")


def test_results_are_printed_if_a_further_engine_does_not_start(
    on_cpu: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*on_cpu, "--batch", "1", "--with", "num-gpu-blocks-override=1"]) == 2
    printed = capsys.readouterr()
    assert "graphs" in printed.out.splitlines()[-1]
    assert "blocks" in printed.err


def test_gpu_benchmark_shows_bandwidth_relative_to_a_plain_read_and_to_the_data_sheet() -> None:
    """Example of a GPU: 16 GB in 8 ms are 2,000 GB/s."""
    step = {"kind": "graphs", "batch": 1, "sampling": "greedy", "step_ms": 8.0, "p99_ms": 9.0, "forward_ms": 7.5}
    step |= {"tokens_per_second": 125.0, "host_ms": 1.3, "launches": 1, "read_once_bytes": 16_000_000_000}
    step |= {"sm_clock_mhz": 1980, "memory_clock_mhz": 2619}
    sheet = DATA_SHEET_GB_PER_S["NVIDIA H100 80GB HBM3"]
    report = {"read_gb_per_s": 3000.0, "data_sheet_gb_per_s": sheet, "context": 8, "engines": {}}
    report["steps"] = [step, step | {"kind": "eager", "launches": 330}]
    text = decode_steps_text(report).splitlines()
    assert text[0] == "a plain read takes 3000 GB/s, 90% of the data sheet's 3350"
    graphs, eager = text[-2:]
    assert graphs.split()[-4:] == ["1", "67%", "60%", "1980/2619"]
    assert "eager (a host's speed)" in eager
    unknown = decode_steps_text(report | {"data_sheet_gb_per_s": None}).splitlines()
    assert unknown[0] == "a plain read takes 3000 GB/s"
    assert unknown[-1].split()[-2:] == ["67%", "1980/2619"], "an unknown GPU has no share of its data sheet"


def test_ttft_is_measured_after_cached_tokens(
    on_cpu: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ttft, "CACHED", (0, 512, 32768))
    assert main([*on_cpu, "--json", "--ttft", "--with", "page-heat=2"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert "steps" not in report
    rows = report["ttft"]["rows"]
    assert [(row["kind"], row["cached"], row["new"]) for row in rows] == [
        (kind, cached, new) for kind in ("kvscope", "page-heat=2") for cached in (0, 512) for new in (16, 256)
    ]
    assert all(row["slowest_ms"] >= row["ttft_ms"] > 0.0 and len(row["each_ms"]) == 5 for row in rows)
    assert len(report["ttft"]["left_out"]) == 2 * 3, "2,000 new tokens, and all after 32k, exceed the model's length"


def test_requests_run_on_both_engines_and_telemetry_is_paired(
    on_cpu: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*on_cpu, "--json", "--requests", "3", "--with", "page-heat=2", "--telemetry", "--batch", "2"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert "steps" not in report
    found = report["requests"]
    ours, theirs = found["kvscope"], found["transformers"]
    assert ours["tokens"] == theirs["tokens"] == found["output_tokens"] > 0
    assert not theirs["is_stopped"]
    assert found["ours_over_theirs"] == pytest.approx(theirs["seconds"] / ours["seconds"])
    assert found["failed"] == []
    for rated in (ours, found["with"]["page-heat=2"]):
        assert rated["ttft_p99_ms"] >= rated["ttft_p50_ms"] > 0.0
        assert rated["between_p99_ms"] >= rated["between_p50_ms"] > 0.0
    steps = report["telemetry"]["batches"]["2"]
    assert len(steps["pairs"]) == 5
    assert steps["ratio"] == steps["with_ms"] / steps["without_ms"] > 0.0


def test_our_result_is_printed_if_transformers_fails(
    on_cpu: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def session(self: object, workload: object) -> None:
        raise RuntimeError("no room for a cache\nand more about it")

    monkeypatch.setattr(TransformersContinuous, "session", session)
    assert main([*on_cpu, "--requests", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("kvscope ") for line in lines)
    assert lines[-1] == "transformers failed: RuntimeError: no room for a cache"


@pytest.mark.parametrize(
    "option",
    [
        ["--requests", "0"],
        ["--limit", "nan"],
        ["--steps", "0"],
        ["--batch", "0"],
        ["--gpu-memory-utilization", "1.5"],
        ["--shape", "9t"],
        ["--sampling", "beam"],
        ["--with", "device=cpu"],
        ["--with", ""],
    ],
)
def test_gpu_benchmark_refuses_an_invalid_option_in_one_line(
    option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "gpu", "--device", "cpu", *option]) == 2
    printed = capsys.readouterr().err
    assert option[0] in printed
    assert printed.count("\n") == 1
