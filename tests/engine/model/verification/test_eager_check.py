"""The check at load detects whatever would make paged attention wrong, in 32 and in 16 bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from kvscope_engine.model.layers.attention.position_cache import PositionCache
from kvscope_engine.model.verification import eager_check
from kvscope_engine.model.verification.check_script import check_block_size, check_sequences, check_steps
from kvscope_engine.model.verification.hook_check import check_hook
from kvscope_engine.model.verification.layer_trace import Trace, nudged
from kvscope_kernels import Ops, ops_for
from kvscope_kernels.attention_args import AttentionArgs
from kvscope_telemetry.errors import BadInput

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "initializer_range": 0.15,
}


def make(dtype: torch.dtype = torch.float32, model_type: str = "mistral", **changes: Any) -> nn.Module:
    """Return a tiny random model whose attention is neither uniform nor on a single token."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    config = AutoConfig.for_model(model_type, **(SIZES | {"sliding_window": 1024} | changes))
    model: nn.Module = auto.from_config(config, dtype=dtype, attn_implementation="eager").eval()
    return model


def with_attention(change: Callable[[AttentionArgs], AttentionArgs]) -> Ops:
    """Return the operations of a CPU with changed attention arguments."""

    def changed(attend: Any) -> Any:
        def call(args: AttentionArgs, *others: Any) -> torch.Tensor:
            result: torch.Tensor = attend(change(args), *others)
            return result

        return call

    ops = ops_for("cpu")
    return dataclasses.replace(ops, decode=changed(ops.decode), prefill=changed(ops.prefill))


def swap_two_blocks(args: AttentionArgs) -> AttentionArgs:
    return args._replace(block_tables=args.block_tables[:, [0, 2, 1]])


def scale_by_more(args: AttentionArgs) -> AttentionArgs:
    return args._replace(scale=args.scale * 1.05)


def widen_the_window(args: AttentionArgs) -> AttentionArgs:
    assert args.sliding_window is not None
    return args._replace(sliding_window=args.sliding_window + 1)


def llama4(dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """Return a model with chunked attention, and a temperature in its last layer, both with lengths far beyond the
    check's sequences.
    """
    sizes = {"intermediate_size_mlp": 96, "num_local_experts": 2, "sliding_window": None, "no_rope_layers": [1, 0]}
    return make(dtype, "llama4_text", **(sizes | {"attention_chunk_size": 1024, "floor_scale": 1024} | changes))


def read_chunks_as_windows(args: AttentionArgs) -> AttentionArgs:
    return args._replace(is_chunked=False)


def read_the_chunk_before(args: AttentionArgs) -> AttentionArgs:
    return args._replace(sliding_window=2 * args.sliding_window) if args.sliding_window is not None else args


def shift_a_slot() -> Ops:
    ops = ops_for("cpu")
    kv_write: Any = ops.kv_write

    def write(*args: Any) -> None:
        shifted = args[4].clone()
        shifted[-1] += 1
        kv_write(*args[:4], shifted, *args[5:])

    changed: Any = write
    return dataclasses.replace(ops, kv_write=changed)


def lose_a_split() -> Ops:
    """Return operations that drop the tokens before the last block of a decode."""
    ops = ops_for("cpu")
    size = check_block_size(torch.device("cpu"))

    def decode(args: AttentionArgs, *others: Any) -> torch.Tensor:
        return ops.decode(args._replace(sliding_window=size), *others)

    changed: Any = decode
    return dataclasses.replace(ops, decode=changed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_eager_check_accepts_a_correct_model(dtype: torch.dtype) -> None:
    assert len(check_hook(make(dtype))) == 2
    assert len(check_hook(make(dtype, "gemma2", query_pre_attn_scalar=16))) == 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "ops",
    [with_attention(swap_two_blocks), with_attention(scale_by_more), with_attention(widen_the_window), shift_a_slot()],
    ids=["swapped blocks", "scale", "window", "slot"],
)
def test_attention_computed_with_wrong_arguments_is_refused_at_load(
    ops: Ops, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eager_check, "ops_for", lambda _: ops)
    with pytest.raises(BadInput, match="differ from those of eager attention"):
        check_hook(make(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("change", [read_chunks_as_windows, read_the_chunk_before])
def test_model_whose_chunked_attention_is_computed_wrongly_is_refused_at_load(
    change: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = llama4(dtype)
    monkeypatch.setattr(eager_check, "ops_for", lambda _: with_attention(change))
    with pytest.raises(BadInput, match="differ from those of eager attention"):
        check_hook(module)


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunked_attention_with_a_temperature_is_accepted(dtype: torch.dtype) -> None:
    module: Any = llama4(dtype)
    options = [call.options for call in check_hook(module)]
    assert [(each.sliding_window, each.is_chunked) for each in options] == [(1024, True), (None, False)]
    lengths = (module.config.attention_chunk_size, module.model.layers[1].self_attn.floor_scale)
    assert lengths == (1024, 1024), "lengths must be shortened during the check only"


def test_temperature_of_wrong_positions_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulates positions counted within the batch, as transformers would."""
    monkeypatch.setattr(PositionCache, "get_seq_length", count_from_the_batch)
    with pytest.raises(BadInput, match="differ from those of eager attention"):
        check_hook(llama4(attn_scale=0.5))


def count_from_the_batch(cache: PositionCache, _: int = 0) -> int:
    cache.num_queries += 1
    return 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_attention_that_loses_a_split_of_the_context_is_detected_at_load(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eager_check, "ops_for", lambda _: lose_a_split())
    with pytest.raises(BadInput, match="differ from those of eager attention"):
        check_hook(make(dtype, sliding_window=None))


def test_windows_are_shortened_during_the_check_only() -> None:
    module = make()
    calls = check_hook(module)
    assert {call.options.sliding_window for call in calls} == {1024}
    assert module.config.sliding_window == 1024  # type: ignore[union-attr]


def test_wrong_large_position_is_detected() -> None:
    """Positions beyond 4,000 are clamped to 4,000, which short sequences from 0 would not show."""
    module: Any = make()
    rotary = module.model.rotary_emb
    forward = rotary.forward
    is_paged = [False]
    rotary.forward = lambda x, position_ids: forward(x, position_ids.clamp(max=4000) if is_paged[0] else position_ids)

    def before(part: Any, args: Any, kwargs: dict[str, Any]) -> None:
        is_paged[0] = kwargs.get("paged") is not None

    module.register_forward_pre_hook(before, with_kwargs=True)
    with pytest.raises(BadInput, match="differ from those of eager attention"):
        check_hook(module)


def test_check_sequences_cover_prefill_decode_and_scaling() -> None:
    config: Any = make(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, **ORIGINAL}).config
    sequences = check_sequences(config, torch.device("cpu"))
    steps = list(check_steps(sequences))
    size = check_block_size(torch.device("cpu"))
    assert sum(sequence.length > 2 * size for sequence in sequences) == 2
    assert int(sequences[1].positions[-1]) == 4095
    assert int(sequences[2].positions[0]) < 1024 <= int(sequences[2].positions[-1])
    assert [step.num_single_token for step in steps] == [0, 1]
    computed = sorted(row for step in steps for row in step.rows)
    assert computed == list(range(sum(sequence.length for sequence in sequences)))


ORIGINAL = {"original_max_position_embeddings": 1024}


def trace_of(attended: torch.Tensor) -> Trace:
    """Return the trace of a layer whose other outputs are constant."""
    rest = torch.ones(len(attended), 8)
    heads = rest[:, None].bfloat16()
    return Trace(inputs={0: rest}, attended={0: attended}, heads={0: heads}, logits=rest)


def elsewhere(attended: torch.Tensor, *tokens: int) -> torch.Tensor:
    """Emulate tokens that were routed to another expert."""
    moved = attended.clone()
    moved[list(tokens)] = moved[list(tokens)].flip(-1)
    return moved


def test_few_tokens_rerouted_by_rounding_are_accepted() -> None:
    plain = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    actual = trace_of(elsewhere(plain, 3))
    calm, restless = trace_of(elsewhere(plain, 3) * 1.001), trace_of(elsewhere(plain, 3, 20))
    fault = "the attention of layer 0"
    assert eager_check.first_fault(actual, trace_of(plain)).startswith(fault)
    assert eager_check.first_fault(actual, trace_of(plain), nudged_traces=[calm]).startswith(fault)
    assert eager_check.first_fault(actual, trace_of(plain), nudged_traces=[calm, restless]) == ""
    of_all = trace_of(plain * 1.1)
    assert eager_check.first_fault(of_all, trace_of(plain), nudged_traces=[trace_of(elsewhere(plain * 1.1, 20))]) != ""
    lost = trace_of(torch.full_like(plain, torch.nan))
    assert eager_check.first_fault(lost, trace_of(plain), nudged_traces=[lost]) != ""


def test_nudging_bfloat16_inputs_changes_each_number_by_one_rounding_unit() -> None:
    values = torch.randn(40, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    moved = nudged(trace_of(values), torch.bfloat16, seed=1).inputs[0]
    assert bool((moved.bfloat16() != trace_of(values).inputs[0]).all())
    assert float((moved - 1).abs().max()) <= torch.finfo(torch.bfloat16).eps
