"""Planned memory for training equals what torch uses, and ZeRO's division follows its paper."""

from __future__ import annotations

import re

import pytest
import torch
from tests.engine.planning.conftest import Make, allocated_peak, close

from kvscope_engine.planning.inference_plan import InferenceQuestion, plan_inference
from kvscope_engine.planning.plan_answer import build_answer
from kvscope_engine.planning.training_plan import TrainingPlan, TrainingQuestion, plan_training
from kvscope_telemetry.errors import BadInput

CASES = [
    pytest.param({"precision": "float32"}, marks=pytest.mark.storm),
    {"precision": "float32", "checkpointing": True},
    {"precision": "float32", "optimizer": "sgd"},
    pytest.param({"precision": "bfloat16"}, marks=pytest.mark.storm),
    {"precision": "bfloat16", "checkpointing": True},
    {"precision": "autocast"},
]


def _train(model: object, question: TrainingQuestion) -> int:
    """Run two training steps. Returns the allocator's peak over the second plus everything held before it."""
    from transformers import AutoModelForCausalLM

    config = model.config  # type: ignore[attr-defined]

    def run() -> None:
        module = AutoModelForCausalLM.from_config(config, dtype=question.weights_dtype, attn_implementation="sdpa")
        module.train()
        if question.checkpointing:
            module.activation_checkpointing_enable()
        kind = torch.optim.AdamW if question.optimizer == "adamw" else torch.optim.SGD
        optimizer = kind(module.parameters(), foreach=False)
        ids = torch.randint(0, 3000, (question.batch_size, question.length))
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=question.precision == "autocast"):
                loss = module(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()

    return allocated_peak(run)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_planned_peak_of_a_training_step_matches_torch(skeleton: Make, case: dict[str, object]) -> None:
    model = skeleton()
    question = TrainingQuestion(batch_size=2, length=128, **case)  # type: ignore[arg-type]
    plan, real = plan_training(model, question), _train(model, question)
    told = build_answer(model, plan_inference(model, InferenceQuestion(gpu_memory=24 << 30)), (), plan).training
    assert told is not None
    assert sum(part.num_bytes for part in told.parts) == told.peak_bytes == plan.peak + plan.others
    assert close(plan.peak, real), f"planned {plan.peak:,}, took {real:,}"


@pytest.mark.parametrize(("length", "words"), [(1024, "none of the"), (16, r"when \d.* of \d.* of gradients|when all")])
def test_parts_of_a_training_plan_describe_the_moment_of_peak_memory(skeleton: Make, length: int, words: str) -> None:
    model = skeleton()
    plan = plan_training(model, TrainingQuestion(length=length))
    told = build_answer(model, plan_inference(model, InferenceQuestion(gpu_memory=24 << 30)), (), plan).training
    assert told is not None
    parts = {part.name: part.num_bytes for part in told.parts}
    assert sum(parts.values()) == told.peak_bytes
    assert parts["activations"] + parts.get("temporary buffers", 0) == plan.at_peak["activations"]
    assert parts.get("gradients", 0) == plan.at_peak["gradients"] <= plan.gradients
    assert re.search(words, told.notes[0]), told.notes


def test_mixed_precision_takes_16_bytes_per_parameter(skeleton: Make) -> None:
    model = skeleton()
    plan = plan_training(model, TrainingQuestion(length=16))
    assert plan.weights + plan.gradients == pytest.approx(4 * model.num_parameters, rel=0.001)
    assert plan.optimizer == 12 * model.num_parameters


def test_zero_stages_match_the_paper(skeleton: Make) -> None:
    """Figure 1: 7.5 billion parameters on 64 ranks take 120, 31.4, 16.6 and 1.9 GB."""
    model = skeleton()
    share = 7.5e9 / model.num_parameters

    def states(stage: int) -> float:
        plan = plan_training(model, TrainingQuestion(length=16, zero=stage, data_parallel=64 if stage else 1))
        return (plan.weights + plan.gradients + plan.optimizer) * share / 1e9

    assert [states(stage) for stage in range(4)] == pytest.approx([120.0, 31.4, 16.6, 1.9], rel=0.02)


def test_activations_grow_with_tokens_and_shrink_with_checkpointing(skeleton: Make) -> None:
    model = skeleton()

    def kept(**what: object) -> TrainingPlan:
        return plan_training(model, TrainingQuestion(**what))  # type: ignore[arg-type]

    short, long = kept(length=128), kept(length=256)
    assert long.activations == pytest.approx(2 * short.activations, rel=0.05)  # attention keeps nothing quadratic
    assert kept(length=256, checkpointing=True).activations < 0.6 * long.activations


def test_zero_stage_3_gathers_one_layer_at_a_time(skeleton: Make) -> None:
    model = skeleton()
    plan = plan_training(model, TrainingQuestion(length=16, zero=3, data_parallel=4))
    assert plan.weights == pytest.approx(2 * model.num_parameters / 4, rel=0.01)
    assert 0 < plan.gathered < 4 * max(model.embedding.total, *(layer.total for layer in model.layers))


def test_training_plan_counts_the_weights_of_all_experts(skeleton: Make) -> None:
    model = skeleton(
        model_type="qwen3_moe",
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        head_dim=32,
        norm_topk_prob=True,
    )
    plan = plan_training(model, TrainingQuestion(length=64))
    assert plan.weights == pytest.approx(2 * model.num_parameters, rel=0.001)
    assert plan.activations > 0


@pytest.mark.parametrize(
    "wrong",
    [{"precision": "fp8"}, {"optimizer": "lion"}, {"zero": 4}, {"batch_size": 0}, {"length": 0}, {"data_parallel": -1}],
    ids=str,
)
def test_invalid_training_plan_option_is_refused_by_name(wrong: dict[str, object]) -> None:
    name, value = next(iter(wrong.items()))
    with pytest.raises(BadInput, match=f"{name}={value!r}"):
        TrainingQuestion(**wrong)  # type: ignore[arg-type]


def test_training_plan_with_a_length_beyond_the_model_is_refused(skeleton: Make) -> None:
    with pytest.raises(BadInput, match=r"length=4096 is not accepted: .* can do 1024"):
        plan_training(skeleton(), TrainingQuestion(length=4096))
