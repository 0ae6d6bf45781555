"""The work of a step compared with plain counting, position by position and weight by weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from torch import nn

from kvscope_engine.model.loaded_model import LoadedModel
from kvscope_engine.policy.kv_groups import GroupRule
from kvscope_engine.policy.step_plan import Scheduled, StepPlan
from kvscope_engine.roofline.model_costs import model_work
from kvscope_engine.roofline.step_costs import LayerKind, ModelWork
from kvscope_telemetry.messages.telemetry import Work

FULL, SLIDING, CHUNKED = LayerKind(0, 8, 40), LayerKind(6, 4, 20), LayerKind(5, 2, 10, is_chunked=True)
MODEL = ModelWork(
    kinds={FULL: 2, SLIDING: 3, CHUNKED: 1},
    weights_bytes=1_000,
    head_bytes=100,
    linear_flops=500,
    head_flops=70,
    token_bytes=30,
    vocab_size=11,
)


def plan(decodes: list[int], chunks: list[tuple[int, int, bool]]) -> StepPlan:
    nobody = cast(Any, None)
    items = [Scheduled(nobody, start, 1, True) for start in decodes]
    items += [Scheduled(nobody, start, num, samples) for start, num, samples in chunks]
    return StepPlan(tuple(items), len(decodes))


STEPS = [
    ([0, 3, 5, 6, 40], []),
    ([], [(0, 1, True), (0, 9, False), (3, 2, False)]),
    ([7], [(5, 4, True), (6, 1, True), (20, 30, False), (2, 4, True)]),
]


@pytest.mark.parametrize(("decodes", "chunks"), STEPS)
def test_computed_work_of_a_step_equals_a_plain_count_of_bytes_and_flops(
    decodes: list[int], chunks: list[tuple[int, int, bool]]
) -> None:
    spans = [(start, 1) for start in decodes] + [(start, num) for start, num, _ in chunks]
    read = written = attention = 0
    for kind, count in MODEL.kinds.items():
        for start, num in spans:
            rule = GroupRule(kind.window, kind.is_chunked)
            seen = [range(rule.first_read(at), at + 1) for at in range(start, start + num)]
            read += count * kind.kv_bytes * len(set().union(*seen))
            attention += count * kind.flops_per_pair * sum(map(len, seen))
            written += count * kind.kv_bytes * num
    work = MODEL.work_of_plan(plan(decodes, chunks))
    assert (work.kv_read_bytes, work.kv_written_bytes, work.attention_flops) == (read, written, attention)
    num_tokens = sum(num for _, num in spans)
    num_samples = len(decodes) + sum(samples for _, _, samples in chunks)
    assert work.flops == attention + 500 * num_tokens + 70 * num_samples
    assert work.weights_bytes == 1_000 + (100 if num_samples else 0)
    assert work.other_bytes == 30 * num_tokens + 8 * 11 * num_samples


def test_sparse_decodes_read_less_and_prompts_the_same() -> None:
    choosing = ModelWork(kinds={FULL._replace(attended=lambda num_tokens: num_tokens // 4): 1}, weights_bytes=0)
    plain = ModelWork(kinds={FULL: 1}, weights_bytes=0)
    decode, prompt = plan([39], []), plan([], [(0, 20, True)])
    assert choosing.work_of_plan(decode).kv_read_bytes * 4 == plain.work_of_plan(decode).kv_read_bytes > 0
    assert choosing.work_of_plan(prompt) == plain.work_of_plan(prompt)


def test_empty_step_has_no_work() -> None:
    assert MODEL.work_of_plan(StepPlan((), 0)) == Work()


def test_step_with_more_tokens_reads_the_weights_of_more_experts_up_to_all() -> None:
    model = ModelWork(kinds={}, weights_bytes=10, expert_bytes=800, expert_share=2 / 8)
    read = [model.work_of_plan(plan([0] * count, [])).weights_bytes - 10 for count in (1, 2, 100)]
    assert read == [200, 350, 800]


@pytest.mark.parametrize("is_tied", [True, False])
def test_linear_layers_of_a_real_model_are_counted(tiny_loaded: Callable[..., LoadedModel], is_tied: bool) -> None:
    loaded = tiny_loaded("llama", tie_word_embeddings=is_tied)
    layers = [
        part for name, part in loaded.module.named_modules() if isinstance(part, nn.Linear) and "head" not in name
    ]
    assert layers
    work = model_work(loaded, loaded.dtype)
    weights = sum(part.weight.numel() for part in layers)
    assert weights <= work.linear_flops / 2 <= weights * 1.02  # and its norms
    config = loaded.hf_config
    again = (
        config.num_hidden_layers * 3 * config.hidden_size
    )  # queries, keys and values have the same size, and so do gate and up
    numbers = sum(part.in_features + part.out_features for part in layers) - again
    assert work.token_bytes == numbers * loaded.dtype.itemsize
    assert work.head_flops == 2 * config.vocab_size * config.hidden_size
    assert work.head_bytes == config.vocab_size * config.hidden_size * loaded.dtype.itemsize
    assert sum(work.kinds.values()) == config.num_hidden_layers
    assert work.weights_bytes == pytest.approx(weights * loaded.dtype.itemsize, rel=0.05)


@pytest.mark.parametrize("has_shared", [False, True])
def test_token_reads_only_its_experts(tiny_loaded: Callable[..., LoadedModel], has_shared: bool) -> None:
    """Shared experts count with the rest of the layer."""
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    shared = {"shared_expert_intermediate_size": 32} if has_shared else {}
    loaded = tiny_loaded("qwen2_moe" if has_shared else "qwen3_moe", **sizes, **shared)
    routed = sum(parameter.nbytes for name, parameter in loaded.module.named_parameters() if ".experts." in name)
    work = model_work(loaded, loaded.dtype)
    assert work.expert_bytes == routed > 0
    assert work.weights_read(1, 0) - work.weights_bytes == routed // 4
    others = sum(parameter.nbytes for parameter in loaded.module.model.layers.parameters()) - routed  # type: ignore[union-attr, operator]
    assert work.weights_bytes == pytest.approx(others, rel=0.01)
