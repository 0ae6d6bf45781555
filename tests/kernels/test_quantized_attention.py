"""Decode and prefill with 8-bit caches equal the float64 reference of the stored values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvscope_kernels.attention_args import AttentionArgs, QueryRuns
from kvscope_kernels.kv_write import kv_write, kv_write_torch
from kvscope_kernels.paged_decode_attention import paged_decode_attention, paged_decode_attention_torch

FORMATS = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}
ALL = {"sliding_window": 13, "softcap": 2.0, "sinks": True}
EDGES = [0, 1, 15, 16, 17, 40]
ONE_KV_HEAD = {"num_heads": 3, "num_kv_heads": 1}
"""One KV head, which halves the programs of the interpreter; other tests have several."""
DECODE: dict[str, dict[str, Any]] = {
    "plain": {"seq_lens": EDGES},
    "all options": {"seq_lens": EDGES, "options": ALL},
    "bf16": {"seq_lens": EDGES, "dtype": torch.bfloat16},
    "fp16": {"seq_lens": EDGES, "dtype": torch.float16},
    "splits": {"seq_lens": [1, 290, 0, 129], "num_heads": 2, "num_kv_heads": 1, "options": {"sinks": True}},
    "odd block, odd dims": {"seq_lens": [0, 6, 7, 8, 30], "block_size": 7, "head_dim": 80, "value_dim": 48},
    "slots of one, heads last": {"seq_lens": [0, 1, 2, 9], "block_size": 1, "layout": "NHD"},
}
PREFILL: dict[str, dict[str, Any]] = {
    "ragged": {"seq_lens": EDGES, "query_lens": EDGES},
    "continued": {"seq_lens": [16, 17, 33, 100, 70, 0], "query_lens": [1, 16, 2, 5, 33, 0], **ONE_KV_HEAD},
    "continued, all options": {"seq_lens": [17, 33, 70], "query_lens": [16, 2, 33], "options": ALL, **ONE_KV_HEAD},
    "bf16": {"seq_lens": [17, 33], "query_lens": [16, 2], "dtype": torch.bfloat16},
    "fp16": {"seq_lens": [17, 33], "query_lens": [16, 2], "dtype": torch.float16},
    "odd block, odd dims": {
        "seq_lens": [16, 33],
        "query_lens": [16, 7],
        "block_size": 7,
        "head_dim": 80,
        "value_dim": 48,
        "layout": "NHD",
    },
    "equal": {"seq_lens": [33, 33], "query_lens": [33, 33], **ONE_KV_HEAD},
}


@pytest.mark.interpreted_in_storms(
    {"name": "plain", "form": "int8"},
    {"name": "all options", "form": "e4m3"},
    {"name": "bf16", "form": "int8"},
    {"name": "fp16", "form": "e4m3"},
    {"name": "splits", "form": "int8"},
    {"name": "odd block, odd dims", "form": "e4m3"},
)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", DECODE)
def test_decode_attention_with_an_8_bit_cache_equals_the_reference(
    name: str, form: str, runner: Any, shape: Any, build: Any, reference: Any, assert_close: Any
) -> None:
    batch = build(shape(**DECODE[name], kv_dtype=FORMATS[form]), runner.device, seed=len(name))
    assert_close(batch.decode(runner.ops), reference(batch))


@pytest.mark.interpreted_in_storms(
    {"name": "ragged", "form": "int8"},
    {"name": "continued", "form": "e4m3"},
    {"name": "continued, all options", "form": "int8"},
    {"name": "equal", "form": "e4m3"},
    {"name": "odd block, odd dims", "form": "int8"},
)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", PREFILL)
def test_prefill_attention_with_an_8_bit_cache_equals_the_reference(
    name: str, form: str, runner: Any, shape: Any, build: Any, reference: Any, assert_close: Any
) -> None:
    batch = build(shape(**PREFILL[name], kv_dtype=FORMATS[form]), runner.device, seed=len(name))
    assert_close(batch.prefill(runner.ops), reference(batch))


@pytest.mark.parametrize("form", FORMATS)
def test_8_bit_decode_attention_of_long_and_short_requests_equals_the_reference(
    form: str, fast_runner: Any, shape: Any, build: Any, reference: Any, assert_close: Any
) -> None:
    lengths = [3000, 1, 17, 1025, 0, 64, 700]  # these are run in several groups
    batch = build(shape(seq_lens=lengths, num_heads=2, kv_dtype=FORMATS[form]), fast_runner.device)
    assert_close(batch.decode(fast_runner.ops), reference(batch))


@pytest.mark.parametrize("form", FORMATS)
def test_tiny_fp16_value_is_not_lost(form: str, runner: Any, shape: Any, build: Any, reference: Any) -> None:
    """Scales of 1e-5 times a softmax weight are far below the normal numbers of float16."""
    batch = build(shape(seq_lens=[60], dtype=torch.float16, kv_dtype=FORMATS[form]), runner.device)
    batch.options["v_scale"].mul_(3e-4)
    for values in batch.values:
        values.mul_(3e-4)
    expected = reference(batch)
    error = (batch.decode(runner.ops).double().cpu() - expected).square().mean().sqrt()
    assert error <= 5e-3 * expected.square().mean().sqrt()


@pytest.mark.parametrize("form", FORMATS)
def test_prefill_attention_over_an_8_bit_cache_is_close_to_that_without_quantization(
    form: str, runner: Any, shape: Any, build: Any, reference: Any
) -> None:
    """The output with a quantized cache is compared with the one without quantization."""
    batch = build(shape(seq_lens=[48], query_lens=[48], num_heads=2, num_kv_heads=1), "cpu", seed=5)
    key, value = (rows[0].float().to(runner.device) for rows in (batch.keys, batch.values))
    storage = torch.zeros(4, 2, 1, 16, 64, dtype=torch.uint8, device=runner.device).view(FORMATS[form])
    k_cache, v_cache = (storage[:, i].transpose(1, 2) for i in range(2))
    scales = torch.zeros(4, 2, 1, 16, device=runner.device)
    k_scale, v_scale = (scales[:, i].transpose(1, 2) for i in range(2))
    tables = torch.tensor([[2, 0, 3]], dtype=torch.int32, device=runner.device)
    position = torch.arange(48, device=runner.device)
    slots = tables[0, position // 16].long() * 16 + position % 16
    runner.ops.kv_write(key, value, k_cache, v_cache, slots, k_scale, v_scale)
    starts, seq_lens = (torch.tensor(each, dtype=torch.int32, device=runner.device) for each in ([0, 48], [48]))
    given = batch.query.to(runner.device), k_cache, v_cache, tables, seq_lens, batch.scale
    out = runner.ops.prefill(AttentionArgs(*given, k_scale=k_scale, v_scale=v_scale), QueryRuns(starts, 48))
    expected = reference(batch)
    error = (out.double().cpu() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error <= {"int8": 0.01, "e4m3": 0.04}[form]


BAD: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "no scales": ("k_scale", lambda b: {"k_scale": None, "v_scale": None}),
    "one scale": ("v_scale", lambda b: {"v_scale": None}),
    "scales of another type": ("k_scale", lambda b: {"k_scale": b.options["k_scale"].half()}),
    "scales of fewer blocks": ("v_scale", lambda b: {"v_scale": b.options["v_scale"][1:]}),
    "other strides": (
        "v_scale",
        lambda b: {"v_scale": b.options["v_scale"].clone(memory_format=torch.preserve_format)},
    ),
    "values of another format": ("v_cache", lambda b: {"v_cache": b.v_cache.float()}),
    "scales without need": ("k_cache", lambda b: {"k_cache": b.k_cache.float(), "v_cache": b.v_cache.float()}),
}


@pytest.mark.parametrize("op", [paged_decode_attention, paged_decode_attention_torch])
@pytest.mark.parametrize("name", BAD)
def test_attention_with_an_int8_cache_names_an_invalid_argument(
    name: str, op: Callable[..., Any], shape: Any, build: Any
) -> None:
    batch = build(shape(seq_lens=[5, 9], kv_dtype=torch.int8))
    argument, change = BAD[name]
    with pytest.raises(ValueError, match=f"^{argument} is "):
        op(batch.args(**change(batch)))


@pytest.mark.parametrize("op", [kv_write, kv_write_torch])
def test_writing_without_scales_is_refused(op: Callable[..., None]) -> None:
    cache, new = torch.zeros(3, 16, 2, 64, dtype=torch.int8), torch.randn(4, 2, 64)
    with pytest.raises(ValueError, match=r"^k_scale is None: \(3, 16, 2\) float32"):
        op(new, new, cache, cache, torch.arange(4))
