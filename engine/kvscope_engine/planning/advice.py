"""What to change so that more fits: options tried one at a time, and only those that help are told of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from kvscope_engine.model.memory.memory_plan import gib
from kvscope_engine.planning.inference import InferencePlan, InferenceQuestion, plan_inference
from kvscope_engine.planning.skeleton import Skeleton
from kvscope_engine.planning.training import TrainingPlan, TrainingQuestion, plan_training
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.plan import Change

FEWER_TOKENS: Final = 2048
"""Of a step: prompts are computed in smaller pieces."""
GPU_SIZES_GIB: Final = (8, 12, 16, 24, 32, 40, 48, 80, 96, 141, 192)
GIB: Final = 1 << 30
MIN_GAIN: Final = 1.02
"""Less is not worth a change."""


def better_serving(skeleton: Skeleton, plan: InferencePlan) -> tuple[Change, ...]:
    """Changes that let more tokens into the KV cache, most first within those that make the longest request fit."""
    found = []
    for options, note, question in _serving_changes(skeleton, plan):
        try:
            other = plan_inference(skeleton, question)
        except BadInput:
            continue  # heads that cannot be divided so, say
        if other.num_tokens > max(plan.num_tokens * MIN_GAIN, 0) or (other.holds_longest and not plan.holds_longest):
            found.append((other, _change(options, note, other)))
    found.sort(key=lambda one: (not one[0].holds_longest, -one[0].num_tokens))
    return tuple(change for _, change in found)


def better_training(skeleton: Skeleton, plan: TrainingPlan, gpu_memory: int) -> tuple[Change, ...]:
    """Where a step does not fit: what would make it smaller, smallest first."""
    if plan.needed <= gpu_memory:
        return ()
    found = []
    for options, question in _training_changes(plan.question):
        try:
            other = plan_training(skeleton, question)
        except BadInput:
            continue
        if other.needed * MIN_GAIN < plan.needed:
            found.append((other.needed, options))
    return tuple(
        Change(options=options, num_tokens=0, num_requests=0, fits=needed <= gpu_memory, note=f"needs {gib(needed)}")
        for needed, options in sorted(found)
    )


def _change(options: str, note: str, plan: InferencePlan) -> Change:
    return Change(
        options=options,
        num_tokens=plan.num_tokens,
        num_requests=plan.requests(plan.max_model_len),
        fits=plan.fits,
        note=note,
    )


def _serving_changes(skeleton: Skeleton, plan: InferencePlan) -> Iterator[tuple[str, str, InferenceQuestion]]:
    question = plan.question
    if question.kv_cache_dtype == "auto":
        yield "--kv-cache-dtype fp8", "8 bits a number, and a scale a vector", replace(question, kv_cache_dtype="fp8")
    if question.max_num_batched_tokens > FEWER_TOKENS:
        fewer = replace(question, max_num_batched_tokens=FEWER_TOKENS)
        yield f"--max-num-batched-tokens {FEWER_TOKENS}", "long prompts take more steps", fewer
    if question.gpu_memory_utilization < 0.95:
        more = replace(question, gpu_memory_utilization=0.95)
        yield "--gpu-memory-utilization 0.95", "less is left for other programs", more
    if not question.enforce_eager:
        yield "--enforce-eager", "no CUDA graphs: small batches are slower", replace(question, enforce_eager=True)
    for dtype in ("int8", "int4") if question.dtype not in ("int8", "int4") else ():
        yield f"--dtype {dtype}", "weights quantized, as vLLM and SGLang can", replace(question, dtype=dtype)
    for number in (2, 4, 8):
        if number > question.tensor_parallel:
            yield f"--tensor-parallel-size {number}", f"{number} such GPUs", replace(question, tensor_parallel=number)
    if not plan.holds_longest and plan.num_tokens:
        shorter = plan.num_tokens // question.block_size * question.block_size
        changed = replace(question, max_model_len=shorter)
        yield f"--max-model-len {shorter}", "requests are at most so long", changed
    yield from _larger_gpus(skeleton, plan)


def _larger_gpus(skeleton: Skeleton, plan: InferencePlan) -> Iterator[tuple[str, str, InferenceQuestion]]:
    """The smallest that holds the longest request, where the present one does not."""
    if plan.holds_longest:
        return
    for size in GPU_SIZES_GIB:
        larger = replace(plan.question, gpu_memory=size * GIB)
        if larger.gpu_memory > plan.question.gpu_memory and plan_inference(skeleton, larger).holds_longest:
            yield f"--gpu-memory {size}GiB", "a larger GPU", larger
            return


def _training_changes(question: TrainingQuestion) -> Iterator[tuple[str, TrainingQuestion]]:
    def changed(**what: Any) -> TrainingQuestion:
        return replace(question, **what)

    if not question.checkpointing:
        yield "--gradient-checkpointing", changed(checkpointing=True)
    if question.batch_size > 1:
        yield "--batch-size 1", changed(batch_size=1)
    if question.precision in ("float32", "autocast"):
        yield "--precision bfloat16", changed(precision="bfloat16")
    if question.optimizer == "adamw":
        yield "--optimizer sgd", changed(optimizer="sgd")
    ranks = max(8, question.data_parallel)
    for stage in (1, 2, 3):
        if stage > question.zero:
            yield f"--zero {stage} --data-parallel-size {ranks}", changed(zero=stage, data_parallel=ranks)
    yield (
        f"--zero 3 --data-parallel-size {ranks} --gradient-checkpointing",
        changed(zero=3, data_parallel=ranks, checkpointing=True),
    )
