"""Attention over MLA latents equals a float64 reference for decodes and runs, split or whole."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvscope_kernels.attention_args import AttentionArgs
from kvscope_kernels.paged_latent_attention import latent_decode, latent_prefill

EDGES = [0, 1, 15, 16, 17, 40]
SMALL = {"head_dim": 40, "value_dim": 32, "num_heads": 4}
REAL = {"head_dim": 576, "value_dim": 512, "num_heads": 16}
DECODES: dict[str, dict[str, Any]] = {
    "edges": {"seq_lens": EDGES, **SMALL},
    "heads that no tile divides": {"seq_lens": EDGES, **SMALL | {"num_heads": 20}},
    "more heads than a tile has rows": {"seq_lens": [70, 3], **SMALL | {"num_heads": 72}},
    "several parts": {"seq_lens": [300, 1, 0, 129], **SMALL},
    "odd dims": {"seq_lens": [0, 6, 7, 30], "block_size": 7, "num_heads": 3, "head_dim": 56, "value_dim": 48},
    "on a CPU": {"seq_lens": EDGES, "layout": "NHD", **SMALL},
    "bf16": {"seq_lens": EDGES, "dtype": torch.bfloat16, **SMALL},
    "int8": {"seq_lens": [*EDGES, 300], "kv_dtype": torch.int8, **SMALL},
    "fp8": {"seq_lens": EDGES, "kv_dtype": torch.float8_e4m3fn, "dtype": torch.bfloat16, **SMALL},
    "real": {"seq_lens": [33], **REAL},
    "real, bf16": {"seq_lens": [33], "dtype": torch.bfloat16, **REAL},
}
RUNS: dict[str, dict[str, Any]] = {
    "from the start": {"seq_lens": [1, 7, 33], "query_lens": [1, 7, 33], **SMALL},
    "behind a context": {"seq_lens": [40, 17, 9], "query_lens": [3, 1, 9], **SMALL},
    "heads that no tile divides": {"seq_lens": [40, 17], "query_lens": [3, 2], **SMALL | {"num_heads": 5}},
    "cut": {"seq_lens": [1300, 20], "query_lens": [3, 2], **SMALL | {"num_heads": 2}},
    "bf16": {"seq_lens": [40, 17], "query_lens": [5, 17], "dtype": torch.bfloat16, **SMALL},
    "int8": {"seq_lens": [40, 17], "query_lens": [5, 17], "kv_dtype": torch.int8, **SMALL},
    "real": {"seq_lens": [20], "query_lens": [2], **REAL},
}


def latents(batch: Any) -> Any:
    """Return the batch with values that are the first numbers of its keys."""
    value_dim = batch.v_cache.shape[3]
    held = [stored_latents(batch, request, value_dim) for request in range(len(batch.keys))]
    values = [keys[..., :value_dim] for keys in held]
    return replace(batch, v_cache=batch.k_cache[..., :value_dim], keys=held, values=values)


def stored_latents(batch: Any, request: int, value_dim: int) -> torch.Tensor:
    """Return the contents of a request in float64; 8-bit caches have one scale for the latents and one for the rest."""
    if "k_scale" not in batch.options:
        found: torch.Tensor = batch.keys[request]
        return found
    positions, block_size = torch.arange(len(batch.keys[request])), batch.k_cache.shape[1]
    at = batch.block_tables.cpu()[request, positions // block_size].long(), positions % block_size
    data, rest, latent = (
        each.cpu()[at].double() for each in (batch.k_cache.float(), batch.options["k_scale"], batch.options["v_scale"])
    )
    is_latent = torch.arange(data.shape[-1]) < value_dim
    return data * torch.where(is_latent, latent[..., None], rest[..., None])


def build_latents(build: Any, shape: Any, runner: Any, given: dict[str, Any], name: str) -> Any:
    return latents(build(shape(num_kv_heads=1, **given), runner.device, seed=len(name)))


@pytest.mark.interpreted_in_storms({"name": "bf16"}, {"name": "on a CPU"}, {"name": "real, bf16"})
@pytest.mark.parametrize("name", DECODES)
def test_mla_decode_attention_equals_the_float64_reference(
    name: str, runner: Any, shape: Any, build: Any, reference: Any, assert_close: Any
) -> None:
    batch = build_latents(build, shape, runner, DECODES[name], name)
    out = batch.poisoned_out()
    assert_close(runner.ops.latent_decode(batch.args(out=out)), reference(batch))


@pytest.mark.interpreted_in_storms({"name": "bf16"})
@pytest.mark.parametrize("name", RUNS)
def test_mla_prefill_attention_equals_the_float64_reference(
    name: str, runner: Any, shape: Any, build: Any, reference: Any, assert_close: Any
) -> None:
    batch = build_latents(build, shape, runner, RUNS[name], name)
    out = batch.poisoned_out()
    assert_close(runner.ops.latent_prefill(batch.args(out=out), batch.runs), reference(batch))


@pytest.mark.parametrize(("num_heads", "kv_dtype"), [(4, None), (20, None), (32, None), (20, torch.int8)])
def test_mla_attention_shares_of_blocks_equal_the_reference(
    num_heads: int, kv_dtype: torch.dtype | None, runner: Any, shape: Any, build: Any, assert_close: Any
) -> None:
    given = {"seq_lens": [40, 0, 17], "kv_dtype": kv_dtype, **SMALL, "num_heads": num_heads}
    batch = build_latents(build, shape, runner, given, "fell")
    shares = torch.zeros(batch.block_tables.shape, device=runner.device)
    runner.ops.latent_decode(batch.args(), shares=shares)
    expected = torch.zeros(shares.shape, dtype=torch.float64)
    for request, keys in enumerate(batch.keys):
        scores = batch.query[request].double().cpu() @ keys[:, 0].T * batch.scale
        for position, share in enumerate(scores.softmax(-1).mean(0).tolist()):
            expected[request, position // 16] += share
    assert_close(shares, expected)


def test_mla_attention_refuses_invalid_latents_and_unsupported_options(shape: Any, build: Any) -> None:
    batch = build(shape(seq_lens=[5], num_kv_heads=1, **SMALL))
    with pytest.raises(ValueError, match=r"v_cache .* the first numbers of k_cache"):
        latent_decode(batch.args())
    args: AttentionArgs = latents(batch).args()
    with pytest.raises(ValueError, match=r"softcap is 2.0: None, with latents"):
        latent_decode(args._replace(softcap=2.0))
    with pytest.raises(ValueError, match=r"sliding_window is 4: None"):
        latent_prefill(args._replace(sliding_window=4), batch.runs)
