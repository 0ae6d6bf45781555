"""Converts a plan to the answer that is shown: memory by purpose, numbers of requests by length, and suggested changes.

Defines the texts of the answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from kvscope_engine.model.device_memory.memory_plan import gib
from kvscope_engine.planning.inference_plan import (
    WEIGHTS_PER_SCALE,
    InferencePlan,
    InferenceQuestion,
    StagePlan,
    plan_inference,
)
from kvscope_engine.planning.live_memory import ACTIVATIONS, GRADIENTS, OPTIMIZER, WEIGHTS
from kvscope_engine.planning.skeleton import Skeleton
from kvscope_engine.planning.training_plan import MASTER_BYTES, TrainingPlan, TrainingQuestion, plan_training
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.memory_plan import (
    MISSING,
    Change,
    Headroom,
    InferenceAnswer,
    PlanAnswer,
    PlanPart,
    StageUse,
    TrainingAnswer,
)

SUGGESTED_BATCHED_TOKENS: Final = 2048
"""Suggested `max_num_batched_tokens` if the current value is higher. Smaller prefill chunks need less memory for
activations.
"""
GPU_SIZES_GIB: Final = (8, 12, 16, 24, 32, 40, 48, 80, 96, 141, 192)
GIB: Final = 1 << 30
MIN_GAIN: Final = 1.02
BUS_BYTES_A_SECOND: Final = 25e9
"""Practical bandwidth of PCIe 4.0 x16 in bytes/s."""
DEFAULT_LENGTHS: Final = (1024, 4096, 16384)
_MOMENTS: Final = {
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer's step",
}


def build_answer(
    skeleton: Skeleton,
    plan: InferencePlan,
    lengths: Sequence[int],
    training: TrainingPlan | None = None,
    *,
    is_first: bool = False,
) -> PlanAnswer:
    """Return the whole answer.

    Lengths beyond the maximum length of a request are left out, and the maximum length is added.

    Args:
        lengths: Numbers of tokens of a request, for each of which to compute how many such requests fit.
        is_first: Omit the suggested changes, each of which takes another plan.
    """
    return PlanAnswer(
        model=skeleton.name,
        architecture=skeleton.architecture,
        num_parameters=skeleton.num_parameters,
        modules=skeleton.by_module,
        inference=_inference(skeleton, plan, lengths, () if is_first else serving_improvements(skeleton, plan)),
        training=None if training is None else _training(skeleton, training, plan.question.gpu_memory),
        is_first=is_first,
    )


def _inference(
    skeleton: Skeleton, plan: InferencePlan, lengths: Sequence[int], changes: tuple[Change, ...]
) -> InferenceAnswer:
    question, tightest = plan.question, plan.tightest
    shown_lengths = sorted({length for length in lengths if length < plan.max_model_len} | {plan.max_model_len})
    return InferenceAnswer(
        gpu_bytes=question.gpu_memory,
        allowed_bytes=tightest.memory.allowed,
        num_gpus=question.tensor_parallel * question.pipeline_parallel,
        fits=plan.fits,
        holds_longest=plan.fits_longest_request,
        max_model_len=plan.max_model_len,
        block_size=question.block_size,
        block_bytes=tightest.block_bytes,
        kv_bytes_a_token=plan.kv_bytes_a_token,
        num_blocks=plan.num_blocks,
        num_host_blocks=tightest.num_host_blocks,
        num_host_states=tightest.num_host_states,
        host_state_bytes=tightest.host_state_bytes,
        num_tokens=plan.num_tokens,
        rooms=tuple(Headroom(num_tokens=length, num_requests=plan.requests(length)) for length in shown_lengths),
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
        ("graphs", memory.graphs, "CUDA graphs, and the buffers they read"),
        ("staging", memory.staging, "for blocks on their way to host memory"),
        ("context and others", memory.others, "the driver's, as measured on H100 and H200"),
        ("recurrent states", stage.state_bytes, f"{stage.num_states:,} slots: of requests, and of prefixes"),
        (
            "KV cache",
            max(0, memory.kv - stage.state_bytes),
            f"{stage.num_blocks:,} blocks of {gib(stage.block_bytes)}",
        ),
        (MISSING, max(0, -memory.kv), "there is too little by this much"),
    ]
    return StageUse(
        number=stage.stage.number,
        first_layer=stage.stage.first_layer,
        num_layers=len(stage.stage.kv),
        parts=tuple(PlanPart(name=name, num_bytes=size, how=how) for name, size, how in parts if size),
        num_blocks=stage.num_blocks,
    )


def _serving_notes(plan: InferencePlan) -> tuple[str, ...]:
    question, notes = plan.question, list[str]()
    length = plan.max_model_len
    if plan.expansion_factor > 1:
        num_expanded = plan.num_requests_of(plan.request_bytes(length) * plan.expansion_factor)
        notes.append(
            "the KV cache holds latents and rotary keys (MLA); with MLA expanded, as keys and values of each head, it"
            f" would be {plan.expansion_factor:,.1f} times as large: {_comparison_text(plan, length, num_expanded)}"
        )
    if plan.index_bytes:
        share = plan.index_bytes / plan.kv_bytes_a_token
        notes.append(f"{share:.0%} of the KV cache, {plan.index_bytes:,} bytes a token, are keys of indexers")
    if plan.own_forward_reason:
        notes.append(
            "kvscope's engine runs this model by transformers' own code, prompts one after the other in each step,"
            f" without CUDA graphs, an 8-bit KV cache or several GPUs ({plan.own_forward_reason:.120})"
        )
    if plan.has_windows:
        groups = plan.tightest.groups
        held_bytes, unfreed_bytes = plan.request_bytes(length), plan.unfreed_bytes(length)
        windows = " and ".join(str(window) for window in sorted({group.rule.window for group in groups} - {0}))
        notes.append(
            f"a request of {length:,} tokens holds {gib(held_bytes)}: layers with a window of {windows} tokens let go"
            f" of what is behind it; without freeing {gib(unfreed_bytes)},"
            f" {unfreed_bytes / held_bytes:.1f} times as much:"
            f" {_comparison_text(plan, length, plan.num_requests_of(unfreed_bytes))}"
        )
    if question.tensor_parallel * question.pipeline_parallel > 1:
        notes.append("kvscope's engine runs on one GPU; vLLM and SGLang run on several, and kvscope watches them")
    if question.dtype == "int8":
        notes.append(
            "kvscope's engine (--quantization int8) takes 8.5 bits a weight: it keeps groups of 64, on one GPU"
        )
    if question.dtype == "fp8":
        notes.append("kvscope's engine (--quantization fp8) takes 8 bits a weight and a scale a row, on one GPU")
    if question.dtype == "int4":
        notes.append("kvscope's engine (--quantization int4) takes 5 bits a weight: it keeps groups of 32, on one GPU")
    if question.weights_on_host:
        least_ms = 1000 * question.weights_on_host / BUS_BYTES_A_SECOND
        notes.append(f"weights in host memory are read in each step: at least {least_ms:.0f} ms over PCIe 4.0 x16")
    return tuple(notes)


def _comparison_text(plan: InferencePlan, length: int, num_others: int) -> str:
    return f"{num_others:,} concurrent requests of {length:,} tokens instead of {plan.requests(length):,}"


def _training(skeleton: Skeleton, plan: TrainingPlan, gpu_memory: int) -> TrainingAnswer:
    question = plan.question
    divided = f", divided by ZeRO-{question.zero} among {question.data_parallel}" if question.zero else ""
    states = (
        f"float32 master weights and {'two moments' if question.optimizer == 'adamw' else 'nothing else'},"
        f" {MASTER_BYTES if question.optimizer == 'adamw' else 4} bytes a parameter (arXiv:1910.02054, 3.1)"
        if question.precision == "mixed"
        else f"as torch's {question.optimizer} makes them"
    )
    activations_text = "layers' inputs alone (arXiv:1604.06174)" if question.checkpointing else "what autograd keeps"
    held_bytes, moment = plan.at_peak, _MOMENTS[plan.peak_phase]
    tokens = f"{question.batch_size} x {question.length:,} tokens"
    parts = [
        ("weights", held_bytes[WEIGHTS], f"{question.precision}{divided if question.zero >= 3 else ''}"),
        ("gradients", held_bytes[GRADIENTS], f"one a parameter{divided if question.zero >= 2 else ''}"),
        ("optimizer states", held_bytes[OPTIMIZER], states + divided),
        ("activations", held_bytes[ACTIVATIONS] - plan.temporary, f"{tokens}: {activations_text}, and the loss"),
        ("temporary buffers", plan.temporary, f"results of the operations that run {moment}"),
        ("gathered weights", plan.gathered, "of the largest layer, and the next (arXiv:1910.02054, 5.3)"),
        ("context", plan.others, "the driver's, as measured on H100 and H200"),
    ]
    return TrainingAnswer(
        gpu_bytes=gpu_memory,
        fits=plan.needed <= gpu_memory,
        parts=tuple(PlanPart(name=name, num_bytes=size, how=how) for name, size, how in parts if size),
        peak_bytes=plan.needed,
        worst=plan.peak_phase,
        changes=training_improvements(skeleton, plan, gpu_memory),
        notes=(_gradients_note(plan, moment),),
    )


def _gradients_note(plan: TrainingPlan, moment: str) -> str:
    held_bytes, total = plan.at_peak[GRADIENTS], gib(plan.gradients)
    if held_bytes >= plan.gradients:
        return f"parts are of the worst moment, {moment}, when all gradients are there"
    held = f"{gib(held_bytes)} of {total}" if held_bytes else f"none of the {total}"
    return f"parts are of the worst moment, {moment}, when {held} of gradients are there"


# Suggested changes: options are tried one at a time, and only those that help are returned.
def serving_improvements(skeleton: Skeleton, plan: InferencePlan) -> tuple[Change, ...]:
    """Return changes with which more tokens fit in the KV cache.

    Changes with which the longest request fits come first, then those with the most tokens.
    """
    changes = []
    for options, note, question in _serving_changes(skeleton, plan):
        try:
            changed_plan = plan_inference(skeleton, question)
        except BadInput:
            continue  # for example, the number of heads is not divisible
        if changed_plan.num_tokens > max(plan.num_tokens * MIN_GAIN, 0) or (
            changed_plan.fits_longest_request and not plan.fits_longest_request
        ):
            changes.append((changed_plan, _change(options, note, changed_plan)))
    changes.sort(key=lambda one: (not one[0].fits_longest_request, -one[0].num_tokens))
    return tuple(change for _, change in changes)


def training_improvements(skeleton: Skeleton, plan: TrainingPlan, gpu_memory: int) -> tuple[Change, ...]:
    """Return changes that reduce the memory of a training step, smallest result first; empty if the step fits."""
    if plan.needed <= gpu_memory:
        return ()
    changes = []
    for options, question in _training_changes(plan.question):
        try:
            changed_plan = plan_training(skeleton, question)
        except BadInput:
            continue
        if changed_plan.needed * MIN_GAIN < plan.needed:
            changes.append((changed_plan.needed, options))
    return tuple(
        Change(options=options, num_tokens=0, num_requests=0, fits=needed <= gpu_memory, note=f"needs {gib(needed)}")
        for needed, options in sorted(changes)
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
    if question.max_num_batched_tokens > SUGGESTED_BATCHED_TOKENS:
        changed_question = replace(question, max_num_batched_tokens=SUGGESTED_BATCHED_TOKENS)
        yield f"--max-num-batched-tokens {SUGGESTED_BATCHED_TOKENS}", "long prompts take more steps", changed_question
    if question.gpu_memory_utilization < 0.95:
        higher_utilization = replace(question, gpu_memory_utilization=0.95)
        yield "--gpu-memory-utilization 0.95", "less is left for other programs", higher_utilization
    if not question.enforce_eager:
        yield "--enforce-eager", "no CUDA graphs: small batches are slower", replace(question, enforce_eager=True)
    for dtype in WEIGHTS_PER_SCALE if question.dtype not in WEIGHTS_PER_SCALE else ():
        yield f"--dtype {dtype}", "weights quantized, as vLLM and SGLang can", replace(question, dtype=dtype)
    for number in (2, 4, 8):
        if number > question.tensor_parallel:
            yield f"--tensor-parallel-size {number}", f"{number} such GPUs", replace(question, tensor_parallel=number)
    if not plan.fits_longest_request and plan.num_tokens:
        shorter = plan.num_tokens // question.block_size * question.block_size
        changed = replace(question, max_model_len=shorter)
        yield f"--max-model-len {shorter}", "requests are at most so long", changed
    yield from _larger_gpus(skeleton, plan)


def _larger_gpus(skeleton: Skeleton, plan: InferencePlan) -> Iterator[tuple[str, str, InferenceQuestion]]:
    if plan.fits_longest_request:
        return
    for size in GPU_SIZES_GIB:
        larger = replace(plan.question, gpu_memory=size * GIB)
        if larger.gpu_memory > plan.question.gpu_memory and plan_inference(skeleton, larger).fits_longest_request:
            yield f"--gpu-memory {size}GiB", "a larger GPU", larger
            return


def _training_changes(question: TrainingQuestion) -> Iterator[tuple[str, TrainingQuestion]]:
    def changed(**fields: Any) -> TrainingQuestion:
        return replace(question, **fields)

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
