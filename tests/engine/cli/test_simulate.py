"""`simulate`: tables, JSON, one-line errors, no partial output on Ctrl-C, and no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvscope_engine.simulator.costs.cost_file import CostFile, save_costs
from kvscope_engine.simulator.costs.cost_model import PRESETS
from kvscope_engine.simulator.simulation import Simulation
from kvscope_telemetry.recordings.reader import Recording

Run = Callable[..., tuple[int, str, str]]
SMALL = ("simulate", "alpaca", "--requests", "30", "--num-gpu-blocks-override", "64", "--max-model-len", "256")


def simulate_json(run: Run, *words: str) -> dict[str, Any]:
    code, out, err = run(*words, "--json")
    assert (code, err, out.count("\n")) == (0, "", 1)
    parsed: dict[str, Any] = json.loads(out)
    return parsed


def test_simulate_table_names_each_allocator_policy(run: Run) -> None:
    code, out, err = run(*SMALL, "--allocator", "all")
    assert (code, err) == (0, "")
    for word in ("paged", "contiguous", "buddy", "oracle", "token states", "preemptions", "per output token"):
        assert word in out
    assert "30 requests" in out


def test_simulate_json_has_one_report_per_allocator_in_the_given_order(run: Run) -> None:
    report = simulate_json(run, *SMALL, "--allocator", "oracle", "--allocator", "paged", "--allocator", "oracle")
    assert [policy["allocator"] for policy in report["policies"]] == ["oracle", "paged"]
    assert report["workload"]["num_requests"] == 30
    assert report["limits"]["num_blocks"] == 64
    for policy in report["policies"]:
        assert policy["num_finished"] == 30
        memory = policy["memory"]
        assert sum(share for name, share in memory.items() if name != "external_fragmentation") == pytest.approx(1)
        assert policy["ttft_s"]["p50"] <= policy["latency_s"]["p99"]


def test_equal_seeds_give_equal_simulations(run: Run) -> None:
    one = simulate_json(run, *SMALL, "--rate", "20", "--arrivals", "bursty", "--seed", "5")
    assert one == simulate_json(run, *SMALL, "--rate", "20", "--arrivals", "bursty", "--seed", "5")
    assert one != simulate_json(run, *SMALL, "--rate", "20", "--arrivals", "bursty", "--seed", "6")


def test_shared_prefix_is_cached_unless_caching_is_off(run: Run) -> None:
    words = (*SMALL, "--shared-prefix", "64", "--rate", "10")
    assert simulate_json(run, *words)["policies"][0]["prefix_hit_rate"] > 0.3
    assert simulate_json(run, *words, "--no-enable-prefix-caching")["policies"][0]["prefix_hit_rate"] == 0


def test_cost_options_override_the_preset(run: Run) -> None:
    words = ("--weight-bytes", "1GB", "--memory-bandwidth", "1GB", "--step-overhead-ms", "500")
    report = simulate_json(run, "simulate", "alpaca", "--requests", "1", "--model-preset", "llama-3.1-8b", *words)
    assert report["cost_model"]["weight_bytes"] == 1e9
    assert report["cost_model"]["kv_bytes_per_token"] == 131_072
    assert report["policies"][0]["ttft_s"]["p50"] == pytest.approx(1.5, rel=0.02)


def test_measured_costs_replace_the_preset(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    cost = replace(PRESETS["opt-66b"].cost, step_overhead_s=0.25)
    save_costs(path, CostFile(model="m", device="d", num_slots=800, max_model_len=128, num_layers=2, cost_model=cost))
    report = simulate_json(run, "simulate", "alpaca", "--requests", "5", "--costs", str(path))
    assert report["cost_model"]["step_overhead_s"] == 0.25
    assert (report["limits"]["num_blocks"], report["limits"]["max_model_len"]) == (50, 128)
    report = simulate_json(
        run, "simulate", "alpaca", "--requests", "5", "--costs", str(path), "--step-overhead-ms", "1"
    )
    assert report["cost_model"]["step_overhead_s"] == 0.001


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("trace.jsonl", '{"timestamp": 0, "input_length": 600, "output_length": 4, "hash_ids": [0, 1]}\n' * 3),
        ("trace.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2023-11-16 18:15:46.6805900,374,44\n" * 3),
    ],
)
def test_trace_file_is_simulated_and_a_bad_line_is_named(run: Run, tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    report = simulate_json(run, "simulate", str(path))
    assert report["workload"]["name"] == name
    assert report["policies"][0]["num_finished"] == 3
    assert simulate_json(run, "simulate", str(path), "--requests", "2")["policies"][0]["num_finished"] == 2
    path.write_text(text + "bad\n")
    code, out, err = run("simulate", str(path))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"{path}, line {text.count(chr(10)) + 1}: " in err


def test_recording_is_simulated_again_with_the_same_result(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "run.mcap"
    first = simulate_json(run, *SMALL, "--rate", "5", "--record", str(path))
    again = simulate_json(run, "simulate", str(path), "--model-preset", "opt-13b")
    assert (again["policies"], again["limits"]) == (first["policies"], first["limits"]), "in the pool that was recorded"
    assert again["notes"] == []
    assert again["workload"] == first["workload"] | {"name": "run.mcap"}
    code, out, err = run(*SMALL, "--record", str(path))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "run.mcap' already exists" in err


def test_each_policy_has_its_own_recording(run: Run, tmp_path: Path) -> None:
    simulate_json(run, *SMALL, "--allocator", "paged", "--allocator", "buddy", "--record", str(tmp_path / "run.mcap"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run-buddy.mcap", "run-paged.mcap"]
    code, out, err = run(*SMALL, "--allocator", "paged", "--allocator", "buddy", "--record", str(tmp_path / "run.mcap"))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "run-paged.mcap' already exists" in err


def test_sample_is_simulated_as_it_was_recorded(run: Run) -> None:
    report = simulate_json(run, "simulate", "sample")
    limits, (paged,) = report["limits"], report["policies"]
    assert [limits[name] for name in ("num_blocks", "block_size", "max_model_len")] == [64, 16, 1024]
    assert [limits[name] for name in ("max_num_seqs", "max_num_batched_tokens")] == [12, 256]
    assert (paged["num_blocks"], paged["block_bytes"]) == (64, 368_640)
    assert (paged["tiers"]["num_host_blocks"], paged["tiers"]["num_disk_blocks"]) == (39, 68)
    assert report["notes"] == []
    assert 34 / 2 < paged["num_preemptions"] < 34 * 2, "34 were recorded"
    assert paged["simulated_s"] == pytest.approx(42.5, rel=0.25)
    assert run("simulate", "sample")[1].splitlines()[0].endswith("64 blocks of 16 slots, at most 1024 tokens a request")


def test_simulate_options_override_the_values_of_a_recording(run: Run) -> None:
    words = ("--num-gpu-blocks-override", "200", "--max-model-len", "512", "--max-num-seqs", "3")
    report = simulate_json(
        run, "simulate", "sample", *words, "--kv-host-memory", "4GiB", "--kv-bytes-per-token", "1KiB"
    )
    limits, (paged,) = report["limits"], report["policies"]
    assert [limits[name] for name in ("num_blocks", "max_model_len", "max_num_seqs")] == [200, 512, 3]
    assert (paged["block_bytes"], paged["tiers"]["num_host_blocks"]) == (16 << 10, (4 << 30) // (16 << 10))
    report = simulate_json(run, "simulate", "sample", "--block-size", "32", "--model-preset", "opt-66b")
    assert (report["limits"]["num_blocks"], report["limits"]["block_size"]) == (32, 32), "of as many bytes"
    assert report["cost_model"]["weight_bytes"] == PRESETS["opt-66b"].cost.weight_bytes
    assert report["cost_model"]["kv_bytes_per_token"] == 23_040
    (paged,) = simulate_json(run, "simulate", "sample", "--kv-memory", "45MiB")["policies"]
    assert paged["num_blocks"] == 128


def test_simulating_a_hybrid_model_recording_uses_its_pool_and_state_sizes(run: Run) -> None:
    report = simulate_json(run, "simulate", "sample-hybrid")
    (paged,) = report["policies"]
    assert (paged["num_blocks"], paged["num_states"], paged["tiers"]["num_host_blocks"]) == (96, 19, 18)
    assert (report["limits"]["max_model_len"], report["notes"]) == (1024, [])


def test_virtual_is_skipped_if_the_recorded_pool_is_too_small(run: Run) -> None:
    report = simulate_json(run, "simulate", "sample", "--allocator", "all")
    assert [policy["allocator"] for policy in report["policies"]] == ["paged", "contiguous", "buddy", "oracle"]
    assert report["notes"][0].startswith("virtual is left out: a pool of 64 blocks (22.50 MiB) is too small")
    code, out, err = run("simulate", "sample", "--allocator", "virtual")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "virtual" in [
        policy["allocator"]
        for policy in simulate_json(run, "simulate", "sample", "--allocator", "all", "--page-size", "64KiB")["policies"]
    ]


TIERS = ("--kv-host-memory", "256MiB", "--kv-disk", "1GB")


def test_lower_tiers_apply_to_paged_only_and_the_table_says_so(run: Run) -> None:
    code, out, err = run(*SMALL, *TIERS, "--allocator", "all")
    assert (code, err) == (0, "")
    for word in ("Lower tiers, blocks", "swapped out", "host %", "reading disk"):
        assert word in out
    assert "contiguous, buddy, virtual, oracle: ran without lower tiers, which only paged has" in out
    assert "ower tiers" not in run(*SMALL, "--allocator", "all")[1]


def test_lower_tiers_are_in_the_json_report(run: Run) -> None:
    words = ("--shared-prefix", "64", "--num-prefixes", "9", "--preemption", "swap", "--max-num-seqs", "64")
    report = simulate_json(run, *SMALL, *TIERS, *words, "--disk-bandwidth", "100GB", "--host-bandwidth", "1TB")
    assert report["tiers"] == {"kv_host_memory": 256 << 20, "kv_disk": 10**9, "preemption": "swap"}
    assert (report["cost_model"]["host_bandwidth"], report["cost_model"]["disk_bandwidth"]) == (1e12, 1e11)
    (paged,) = report["policies"]
    tiers = paged["tiers"]
    assert (tiers["num_host_blocks"], tiers["num_disk_blocks"]) == (20, 76)
    assert min(tiers["swapped_blocks"], tiers["offloaded_blocks"], tiers["disk_blocks"], tiers["loaded_blocks"]) > 0
    parts = [tiers[f"{name}_hit_rate"] for name in ("pool", "host", "disk")]
    assert sum(parts) == pytest.approx(paged["prefix_hit_rate"])
    assert paged["num_finished"] == 30


def test_refused_requests_are_reported_and_refusing_all_is_an_error(run: Run) -> None:
    code, out, _ = run("simulate", "sharegpt", "--requests", "50", "--num-gpu-blocks-override", "20")
    assert code == 0
    assert "requests refused; the first: " in out
    code, out, err = run("simulate", "sharegpt", "--requests", "3", "--num-gpu-blocks-override", "1")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "no request of 'sharegpt' can be served: " in err


GEMMA = {
    "model_type": "gemma3_text",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "sliding_window": 32,
    "sliding_window_pattern": 3,
}
"""Two layers with full attention and four with a window: three groups of two layers, 128 bytes per token each."""


@pytest.fixture
def gemma(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GEMMA))
    return str(path)


@pytest.mark.filterwarnings("ignore")
def test_simulate_reports_kv_groups_and_a_comparison_without_freeing_window_blocks(
    run: Run, gemma: str, tmp_path: Path
) -> None:
    words = ("simulate", "alpaca", "--requests", "40", "--max-model-len", "256", "--model", gemma)
    size = ("--kv-memory", "150KiB")
    now, kept = simulate_json(run, *words, *size, "--without-freeing")["policies"]
    assert [(group["kind"], group["window"], group["num_layers"], group["token_bytes"]) for group in now["groups"]] == [
        ("full", 0, 2, 128.0),
        ("window", 32, 2, 128.0),
        ("window", 32, 2, 128.0),
    ]
    assert (now["num_blocks"], kept["num_blocks"]) == (75, 25)
    assert (now["question"], kept["question"]) == ("", "without freeing")
    assert now["mean_batch"] > 1.2 * kept["mean_batch"]
    assert now["groups"][1]["most_blocks"] < now["groups"][0]["most_blocks"]
    path = tmp_path / "run.mcap"
    code, out, err = run(*words, *size, "--record", str(path))
    assert (code, err) == (0, "")
    assert "KV groups, blocks that requests held" in out
    assert "window of 32" in out
    again = simulate_json(run, "simulate", str(path), "--without-freeing", "--model-preset", "opt-13b")["policies"]
    assert again == [now, kept], "a recording must contain its groups and size"
    blocks = simulate_json(run, *words, "--num-gpu-blocks-override", "75", "--without-freeing")["policies"]
    assert blocks == [now, kept]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ((), "WORKLOAD"),
        (("gsm8k",), "'gsm8k'"),
        (("nowhere.jsonl",), "No such file"),
        (("nowhere.csv", "--rate", "3"), "--rate is not accepted with a trace"),
        (("nowhere.csv", "--shared-prefix", "3"), "--shared-prefix is not accepted with a trace"),
        (("nowhere.mcap",), "recording 'nowhere.mcap' cannot be read: No such file"),
        (("nowhere.mcap", "--rate", "3"), "--rate is not accepted with a trace or a recording"),
        (("alpaca", "--record", "run.rrd"), "'run.rrd' is not accepted: its name ends in .mcap"),
        (("alpaca", "--record", "no/where.mcap"), "'no/where.mcap' cannot be written"),
        (("alpaca", "--costs", "nowhere.json"), "costs 'nowhere.json' cannot be read: No such file"),
        (("alpaca", "--requests", "0"), "requests=0"),
        (("alpaca", "--rate", "0"), "rate=0.0"),
        (("alpaca", "--allocator", "slab"), "'slab'"),
        (("alpaca", "--block-size", "0"), "block_size=0"),
        (("alpaca", "--num-gpu-blocks-override", "0"), "num_gpu_blocks_override=0"),
        (("alpaca", "--flops-per-second", "nan"), "flops_per_second=nan"),
        (("alpaca", "--step-overhead-ms", "-1"), "step_overhead_s=-0.001"),
        (("alpaca", "--model-preset", "gpt-9"), "'gpt-9'"),
        (("alpaca", "--kv-disk", "1GB"), "kv_disk=1000000000 is not accepted without host memory"),
        (("alpaca", "--preemption", "swap"), "preemption='swap' is not accepted without host memory"),
        (("alpaca", "--preemption", "drop"), "'drop'"),
        (("alpaca", "--kv-host-memory", "1MB"), "one block takes 13107200 bytes"),
        (("alpaca", "--kv-host-memory", "much"), "'much'"),
        (("alpaca", "--kv-host-memory", "1GB", "--allocator", "virtual"), "only `paged` has lower tiers"),
        (("alpaca", "--without-freeing"), "no layer has a window or chunks: give --model"),
        (("alpaca", "--mla-expanded"), "--mla-expanded is not accepted, as no layer holds latents"),
        (("alpaca", "--state-checkpoints", "4"), "no layer keeps a state"),
        (("alpaca", "--num-prefixes", "0"), "num_prefixes=0"),
        (("alpaca", "--num-prefixes", "2"), "num_prefixes=2 is not accepted without a length (--shared-prefix)"),
        (("nowhere.csv", "--num-prefixes", "3"), "--num-prefixes is not accepted with a trace"),
        (("alpaca", "--allocator", "all", "--max-model-len", "99999"), "max_model_len=99999"),
    ],
)
def test_simulate_refuses_invalid_input_in_one_line(run: Run, words: tuple[str, ...], named: str) -> None:
    code, out, err = run("simulate", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("kvscope-engine: ")
    assert named in err


def test_ctrl_c_during_simulate_prints_no_partial_output(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    advance = Simulation.advance

    def interrupted(simulation: Simulation) -> bool:
        if simulation.allocator == "oracle" and simulation.step_count == 3:
            raise KeyboardInterrupt
        return advance(simulation)

    monkeypatch.setattr(Simulation, "advance", interrupted)
    assert run(*SMALL, "--allocator", "all") == (130, "", "kvscope-engine: interrupted\n")


def test_simulate_never_imports_torch() -> None:
    program = (
        "import sys\n"
        "from kvscope_engine.cli.main import main\n"
        "assert main(sys.argv[1:]) == 0\n"
        "print(sorted({'torch', 'transformers', 'triton'} & set(sys.modules)))\n"
    )
    command = [sys.executable, "-c", program, *SMALL, "--allocator", "all", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "[]"


def test_interval_between_saved_states_is_that_of_the_recording(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "run.mcap"
    options = ("--requests", "6", "--state-interval", "64")
    simulate_json(run, "simulate", "sample-hybrid", *options, "--record", str(path))
    assert Recording.open(path).info.hello.cache.state_interval == 64
    recorded = simulate_json(run, "simulate", str(path))
    assert recorded["policies"] == simulate_json(run, "simulate", str(path), "--state-interval", "64")["policies"]
    assert run("simulate", "sample-hybrid", "--state-interval", "0")[0] == 2
