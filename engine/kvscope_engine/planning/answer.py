"""A plan as what is said of it: parts that add up, rooms by length, and what to change. Owns the words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvscope_engine.model.memory.memory_plan import gib
from kvscope_engine.planning.advice import better_serving, better_training
from kvscope_engine.planning.inference import InferencePlan, StagePlan
from kvscope_engine.planning.skeleton import Skeleton
from kvscope_engine.planning.training import MASTER_BYTES, TrainingPlan
from kvscope_telemetry.messages.plan import Change, InferenceAnswer, Part, PlanAnswer, Room, StageUse, TrainingAnswer

BUS_BYTES_A_SECOND: Final = 25e9
"""Of PCIe 4.0 x16 as it is reached in practice."""
DEFAULT_LENGTHS: Final = (1024, 4096, 16384)


def answer(
    skeleton: Skeleton,
    plan: InferencePlan,
    lengths: Sequence[int],
    training: TrainingPlan | None = None,
    *,
    is_first: bool = False,
) -> PlanAnswer:
    """All that is said. `lengths` in tokens; those beyond the longest request are left out, that one is added.

    `is_first`: without what to change, which is as many plans again.
    """
    return PlanAnswer(
        model=skeleton.name,
        architecture=skeleton.architecture,
        num_parameters=skeleton.num_parameters,
        modules=skeleton.by_module,
        inference=_inference(skeleton, plan, lengths, () if is_first else better_serving(skeleton, plan)),
        training=None if training is None else _training(skeleton, training, plan.question.gpu_memory),
        is_first=is_first,
    )


def _inference(
    skeleton: Skeleton, plan: InferencePlan, lengths: Sequence[int], changes: tuple[Change, ...]
) -> InferenceAnswer:
    question, tightest = plan.question, plan.tightest
    shown = sorted({length for length in lengths if length < plan.max_model_len} | {plan.max_model_len})
    return InferenceAnswer(
        gpu_bytes=question.gpu_memory,
        allowed_bytes=tightest.memory.allowed,
        num_gpus=question.tensor_parallel * question.pipeline_parallel,
        fits=plan.fits,
        holds_longest=plan.holds_longest,
        max_model_len=plan.max_model_len,
        block_size=question.block_size,
        block_bytes=tightest.block_bytes,
        kv_bytes_a_token=plan.kv_bytes_a_token,
        num_blocks=plan.num_blocks,
        num_host_blocks=tightest.num_host_blocks,
        num_tokens=plan.num_tokens,
        rooms=tuple(Room(num_tokens=length, num_requests=plan.requests(length)) for length in shown),
        stages=tuple(_stage(stage, plan) for stage in plan.stages),
        changes=changes,
        notes=_serving_notes(plan),
    )


def _stage(stage: StagePlan, plan: InferencePlan) -> StageUse:
    memory, reserves, question = stage.memory, stage.memory.reserves, plan.question
    parts = [
        ("weights", memory.weights, f"parameters in {question.dtype}"),
        ("activations", memory.activations, f"a step of {question.max_num_batched_tokens:,} tokens, run without data"),
        ("logits and sampling", memory.sampling, f"of {question.max_num_seqs} requests, every option on"),
        ("attention's partial results", reserves.attention_partials, "a long sequence, split"),
        ("graphs", reserves.graphs, "CUDA graphs, and the buffers they read"),
        ("staging", memory.staging, "for blocks on their way to host memory"),
        ("context and others", memory.others, "the driver's, as measured on H100 and H200"),
        ("KV cache", max(0, memory.kv), f"{stage.num_blocks:,} blocks of {gib(stage.block_bytes)}"),
        ("missing", max(0, -memory.kv), "there is too little by this much"),
    ]
    return StageUse(
        number=stage.stage.number,
        first_layer=stage.stage.first_layer,
        num_layers=len(stage.stage.kv),
        parts=tuple(Part(name=name, num_bytes=size, how=how) for name, size, how in parts if size),
        num_blocks=stage.num_blocks,
    )


def _serving_notes(plan: InferencePlan) -> tuple[str, ...]:
    question, notes = plan.question, []
    if question.tensor_parallel * question.pipeline_parallel > 1:
        notes.append("kvscope's engine runs on one GPU; vLLM and SGLang run on several, and kvscope watches them")
    if question.dtype == "int8":
        notes.append(
            "kvscope's engine (--quantization int8) takes 8.5 bits a weight: it keeps groups of 64, on one GPU"
        )
    if question.dtype == "int4":
        notes.append("kvscope's engine (--quantization int4) takes 5 bits a weight: it keeps groups of 32, on one GPU")
    if question.weights_on_host:
        least_ms = 1000 * question.weights_on_host / BUS_BYTES_A_SECOND
        notes.append(f"weights in host memory are read in each step: at least {least_ms:.0f} ms over PCIe 4.0 x16")
    return tuple(notes)


def _training(skeleton: Skeleton, plan: TrainingPlan, gpu_memory: int) -> TrainingAnswer:
    question = plan.question
    divided = f", divided by ZeRO-{question.zero} among {question.data_parallel}" if question.zero else ""
    states = (
        f"float32 master weights and {'two moments' if question.optimizer == 'adamw' else 'nothing else'},"
        f" {MASTER_BYTES if question.optimizer == 'adamw' else 4} bytes a parameter (arXiv:1910.02054, 3.1)"
        if question.precision == "mixed"
        else f"as torch's {question.optimizer} makes them"
    )
    kept = "layers' inputs alone (arXiv:1604.06174)" if question.checkpointing else "what autograd keeps"
    parts = [
        ("weights", plan.weights, f"{question.precision}{divided if question.zero >= 3 else ''}"),
        ("gradients", plan.gradients, f"one a parameter{divided if question.zero >= 2 else ''}"),
        ("optimizer states", plan.optimizer, states + divided),
        ("activations", plan.activations, f"{question.batch_size} x {question.length:,} tokens: {kept}, and the loss"),
        ("gathered weights", plan.gathered, "of the largest layer, and the next (arXiv:1910.02054, 5.3)"),
        ("context", plan.others, "the driver's, as measured on H100 and H200"),
    ]
    return TrainingAnswer(
        gpu_bytes=gpu_memory,
        fits=plan.needed <= gpu_memory,
        parts=tuple(Part(name=name, num_bytes=size, how=how) for name, size, how in parts if size),
        peak_bytes=plan.needed,
        worst=plan.worst,
        changes=better_training(skeleton, plan, gpu_memory),
        notes=("gradients and activations are not all there at once: the peak is at the worst moment, not their sum",),
    )
