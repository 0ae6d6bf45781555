"""Command-line options become a configuration; sizes with units."""

from __future__ import annotations

import argparse
import dataclasses

import pytest

from kvscope_engine.cli.arguments.engine_options import add_engine_options, engine_config
from kvscope_engine.command_parser import CommandParser, parse_size
from kvscope_telemetry.engine_config import EngineConfig, LoraModule, SpeculativeConfig
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.kv_events.kv_events_config import KvEventsConfig


def config(*words: str) -> EngineConfig:
    parser = CommandParser(prog="test")
    add_engine_options(parser)
    return engine_config(parser.parse_args(words))


def test_no_options_give_the_default_configuration() -> None:
    assert config() == EngineConfig()


def test_every_field_of_the_engine_configuration_can_be_set_by_an_option() -> None:
    found = config(
        *("--model", "m", "--device", "cpu", "--dtype", "float32", "--kv-cache-dtype", "int8"),
        *("--block-size", "32", "--max-model-len", "99", "--max-num-seqs", "3"),
        *("--max-num-batched-tokens", "77", "--gpu-memory-utilization", "0.5"),
        *("--num-gpu-blocks-override", "12", "--kv-memory", "1MiB", "--no-enable-prefix-caching"),
        *("--allocator", "paged", "--seed", "5", "--num-threads", "1"),
        *("--kv-host-memory", "2MiB", "--kv-disk", "3MiB", "--kv-disk-path", "kv.bin", "--kv-disk-keep"),
        *(
            "--preemption",
            "swap",
            "--enforce-eager",
            "--piecewise-graphs",
            "--attention-backend",
            "FLASH_ATTN",
            "--no-async-scheduling",
            "--page-heat",
            "8",
        ),
        *("--cpu-offload-gb", "1.5", "--state-checkpoints", "7", "--state-interval", "256"),
        *("--kv-events-config", '{"topic": "kv"}', "--quantization", "none"),
        *("--generation-config", "none"),
        *("--speculative-config", '{"num_speculative_tokens": 3}'),
        *("--max-loras", "2", "--max-lora-rank", "8"),
    )
    assert found == EngineConfig(
        model="m",
        generation_config="none",
        device="cpu",
        dtype="float32",
        kv_cache_dtype="int8",
        block_size=32,
        max_model_len=99,
        max_num_seqs=3,
        state_checkpoints=7,
        state_interval=256,
        max_num_batched_tokens=77,
        gpu_memory_utilization=0.5,
        num_gpu_blocks_override=12,
        kv_memory_bytes=1 << 20,
        enable_prefix_caching=False,
        seed=5,
        num_threads=1,
        host_kv_memory_bytes=2 << 20,
        disk_kv_memory_bytes=3 << 20,
        disk_kv_path="kv.bin",
        keep_disk_kv=True,
        preemption="swap",
        enforce_eager=True,
        cpu_offload_gb=1.5,
        piecewise_graphs=True,
        page_heat=8,
        quantization="none",
        attention_backend="flash-attn",
        async_scheduling=False,
        kv_events_config=KvEventsConfig(topic="kv"),
        speculative_config=SpeculativeConfig(num_speculative_tokens=3),
        max_loras=2,
        max_lora_rank=8,
    )
    same = [
        field.name
        for field in dataclasses.fields(EngineConfig)
        if getattr(found, field.name) == getattr(EngineConfig(), field.name)
    ]
    alone = ["tensor_parallel_size", "deterministic", "fingerprints", "sparse_decode", "allocator"]
    assert same == [*alone, "lora_modules", "allow_runtime_lora_updating"]  # options that conflict with the others


def test_deterministic_option_is_refused_together_with_options_that_break_determinism() -> None:
    found = config("--deterministic", "--fingerprints")
    assert (found.deterministic, found.fingerprints) == (True, True)
    for refused in ("--page-heat=8", "--kv-cache-dtype=int8", "--attention-backend=flashinfer"):
        with pytest.raises(BadInput, match="is not accepted with deterministic=True"):
            config("--deterministic", refused)
    with pytest.raises(BadInput, match="without deterministic"):
        config("--fingerprints")


def test_lora_modules_are_parsed_in_both_vllm_syntaxes() -> None:
    found = config("--lora-modules", "sql=a/b", '{"name": "py", "path": "c=d"}', "--allow-runtime-lora-updating")
    assert found.lora_modules == (LoraModule(name="sql", path="a/b"), LoraModule(name="py", path="c=d"))
    assert (found.num_lora_slots, found.has_lora, config().has_lora) == (2, True, False)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("sql", "'sql' is not accepted: NAME=FOLDER, or"),
        ("=x", "'=x' is not accepted: NAME=FOLDER, or"),
        ('{"name": "sql"}', "field 'path' is missing"),
        ('{"name": "sql", "path": "x", "rank": 3}', "field 'rank' is not known"),
    ],
)
def test_invalid_lora_module_is_refused(given: str, says: str) -> None:
    with pytest.raises(BadInput) as refusal:
        config("--lora-modules", given)
    assert says in str(refusal.value)


def test_tensor_parallel_size_has_two_option_names() -> None:
    assert config("--tensor-parallel-size", "4") == config("-tp", "4") == EngineConfig(tensor_parallel_size=4)


def test_kv_events_need_prefix_caching() -> None:
    words = ("--kv-events-config", '{"enable_kv_cache_events": true}')
    assert config(*words).publishes_kv_events
    with pytest.raises(BadInput, match="without prefix caching"):
        config(*words, "--no-enable-prefix-caching")
    with pytest.raises(BadInput, match="field 'port' is not known: one of enable_kv_cache_events"):
        config("--kv-events-config", '{"port": 5557}')


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1B", 1),
        ("4096", 4096),
        ("512MiB", 512 << 20),
        ("512mib", 512 << 20),
        ("4G", 4 << 30),
        ("2GB", 2 * 10**9),
        ("1.5 KiB", 1536),
        ("8K", 8192),
    ],
)
def test_size_with_unit_is_parsed(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


NO_SIZES = ["", "0", "24", "4095", "-1", "0.0001", "1e9", "12 XB", "MiB", "inf", "nan", "1MiB2", "9" * 400 + "GB"]


@pytest.mark.parametrize("text", NO_SIZES, ids=lambda text: text[:9])
def test_invalid_size_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="a size such as"):
        parse_size(text)


def test_value_out_of_range_is_named() -> None:
    with pytest.raises(BadInput, match="--max-num-seqs: '0' is not accepted: must be a whole number from 1"):
        config("--max-num-seqs", "0")
    with pytest.raises(BadInput, match="--max-model-len: '0'"):
        config("--max-model-len", "0")


def test_sparse_decode_fraction_is_parsed() -> None:
    assert config("--sparse-decode", "0.25").sparse_decode == 0.25
    assert config().sparse_decode is None
