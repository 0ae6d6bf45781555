"""Steps on paged blocks give the tokens of transformers' eager attention, whatever the schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvscope_engine.model.loaded_model import LoadedModel
from kvscope_engine.model.verification.fuse import FusedCounts
from kvscope_kernels.copy_rows import copy_rows_torch

MODELS = ("llama", "qwen3", "mistral", "gemma2", "gpt_oss")
LENGTHS = (1, 3, 4, 5, 9, 23)
NUM_TOKENS = 9

Load = Callable[..., LoadedModel]
Eager = Callable[..., list[int]]


def _prompts(vocab_size: int) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(3, vocab_size, length).tolist() for length in LENGTHS]


@pytest.mark.parametrize("model_type", MODELS)
def test_tokens_equal_eager_attention_for_any_schedule(
    model_type: str, tiny_loaded: Load, planned: Any, eager_tokens: Eager
) -> None:
    prompts = _prompts(320)
    reference = tiny_loaded(model_type)
    expected = [eager_tokens(reference, prompt, NUM_TOKENS) for prompt in prompts]
    loaded = tiny_loaded(model_type)

    together = planned(loaded)
    for prompt in prompts:
        together.add(prompt, NUM_TOKENS)
    assert together.run() == expected

    pieces = planned(loaded, seed=1)
    for index, prompt in enumerate(prompts):
        pieces.add(prompt, NUM_TOKENS)
        if index % 2:
            pieces.step(max_chunk=4)
    for victim in (2, 5):
        pieces.step(max_chunk=3)
        pieces.preempt(pieces.requests[victim])
    assert pieces.run(max_chunk=5) == expected

    for prompt, tokens in zip(prompts[-2:], expected[-2:], strict=True):
        alone = planned(loaded, seed=2)
        alone.add(prompt, NUM_TOKENS)
        assert alone.run() == [tokens]


@pytest.mark.parametrize(("model_type", "kv_cache_dtype"), [("gemma2", "int8"), ("gpt_oss", "fp8")])
def test_quantized_cache_tokens_do_not_depend_on_batch_or_chunks(
    model_type: str, kv_cache_dtype: str, tiny_loaded: Load, planned: Any
) -> None:
    """A prompt's own tokens are read back from the cache too, so that other chunk borders change nothing."""
    prompts, loaded = _prompts(320), tiny_loaded(model_type)
    alone = []
    for prompt in prompts:
        run = planned(loaded, kv_cache_dtype=kv_cache_dtype)
        run.add(prompt, NUM_TOKENS)
        alone += run.run()
    pieces = planned(loaded, seed=1, kv_cache_dtype=kv_cache_dtype)
    for index, prompt in enumerate(prompts):
        pieces.add(prompt, NUM_TOKENS)
        if index % 2:
            pieces.step(max_chunk=4)
    pieces.preempt(pieces.requests[2])
    assert pieces.run(max_chunk=5) == alone


def test_expected_number_of_parts_is_fused_for_each_architecture(tiny_loaded: Load, planned: Any) -> None:
    found = {name: planned(tiny_loaded(name)).runner.fused for name in MODELS}
    packed = found["llama"].packed
    assert (
        found["llama"]
        == found["mistral"]
        == FusedCounts(attentions=2, mlps=2, norms=5, layers=2, packed=packed, float32_residual=False)
    )
    assert found["qwen3"] == FusedCounts(attentions=2, mlps=2, norms=5, layers=2, packed=packed, float32_residual=False)
    assert found["gemma2"] == FusedCounts(
        attentions=2, mlps=2, norms=9, layers=0, packed=packed, float32_residual=False
    )
    assert found["gpt_oss"] == FusedCounts(
        attentions=2, mlps=0, norms=5, layers=0, packed=packed, float32_residual=False
    )


def test_logprobs_equal_those_of_the_model(tiny_loaded: Load, planned: Any) -> None:
    run = planned(tiny_loaded("llama"))
    prompt = _prompts(320)[-1]
    request = run.add(prompt, 4, logprobs=3)
    silent = run.add(prompt[:5], 4)
    run.run(max_chunk=10)
    reference: Any = tiny_loaded("llama").module
    reference.set_attn_implementation("eager")
    with torch.inference_mode():
        logits = reference(input_ids=torch.tensor([prompt + request.output_token_ids]), use_cache=False).logits[0]
    expected = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    assert run.logprobs[silent.number] == []
    for row, details in zip(expected, run.logprobs[request.number], strict=True):
        assert details.logprob == pytest.approx(float(row[details.token_id]), abs=1e-4)
        assert [token for token, _ in details.top] == row.topk(3).indices.tolist()


def test_step_without_a_sample_returns_nothing(tiny_loaded: Load, planned: Any) -> None:
    run = planned(tiny_loaded("qwen3"))
    request = run.add(_prompts(320)[-1], 1)
    run.step(max_chunk=6)
    assert request.output_token_ids == []
    run.step(max_chunk=17)
    assert len(request.output_token_ids) == 1


def test_copied_blocks_have_the_contents_of_their_sources(tiny_loaded: Load, planned: Any, eager_tokens: Eager) -> None:
    """Copy on write: a fork continues in copies while its parent's blocks are overwritten with NaN."""
    prompt = _prompts(320)[-1]
    expected = eager_tokens(tiny_loaded("llama"), prompt, 6)
    run = planned(tiny_loaded("llama"))
    request = run.add(prompt, 6)
    for _ in range(3):
        run.step()
    old = list(request.block_table)
    new = [run.free.pop() for _ in old]
    copy_rows_torch(run.storage.rows, torch.tensor(list(zip(old, new, strict=True))))
    for layer in range(len(run.storage.layers)):
        for part in run.storage.kv(layer):
            part[old] = float("nan")
    request.block_table[:] = new
    assert run.run() == [expected]


def test_seeded_tokens_do_not_depend_on_the_batch(tiny_loaded: Load, planned: Any) -> None:
    loaded = tiny_loaded("llama")
    prompts = _prompts(320)
    options: dict[str, Any] = {"temperature": 1.5, "seed": 11, "top_p": 0.9, "min_p": 0.01}
    alone = planned(loaded)
    alone.add(prompts[3], 12, **options)
    crowd = planned(loaded, seed=3)
    for index, prompt in enumerate(prompts):
        crowd.add(prompt, 12, **(options if index == 3 else {"temperature": 0.7 * index, "seed": index, "top_k": 9}))
    crowd.step(max_chunk=2)
    crowd.preempt(crowd.requests[3])
    assert crowd.run(max_chunk=4)[3] == alone.run()[0]
    assert len(set(crowd.requests[3].output_token_ids)) > 3, "the tokens must not be greedy"


def test_packed_weights_are_counted_once(tiny_loaded: Load, planned: Any) -> None:
    untied = tiny_loaded("llama")
    before = sum(parameter.nbytes for parameter in untied.module.parameters())
    assert planned(untied).runner.weights_bytes == pytest.approx(before, rel=0.01)


@pytest.mark.parametrize("model_type", MODELS)
def test_warm_up_on_a_cpu_runs_the_model_and_leaves_the_cache_unchanged(
    model_type: str, tiny_loaded: Load, planned: Any
) -> None:
    loaded = tiny_loaded(model_type)
    run = planned(loaded)
    numbers_of_tokens: list[int] = []
    loaded.module.register_forward_pre_hook(
        lambda module, args, kwargs: numbers_of_tokens.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    assert all(tensor.isnan().all() for tensor in run.storage.block_tensors)
    run.runner.warm_up(lambda progress: None)
    assert numbers_of_tokens == [8, 1]
    assert all(tensor.isnan().all() for tensor in run.storage.block_tensors)
