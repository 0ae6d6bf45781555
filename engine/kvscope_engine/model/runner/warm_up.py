"""Compiles every kernel that steps can need and captures CUDA graphs, before the first request.

Decides which warm-up steps are run. These steps write no KV and attend to no tokens, so no block of the pool needs to
exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from kvscope_engine.model.cuda_graphs.decode_graphs import DecodeGraphs
from kvscope_engine.model.cuda_graphs.piecewise.piecewise_graphs import PiecewiseGraphs
from kvscope_engine.model.device_memory.step_buffer import StepBuffer
from kvscope_engine.model.input_batch.step_limits import StepLimits
from kvscope_engine.model.input_batch.step_tensors import StepTensors, table_width
from kvscope_engine.model.layers.attention.paged_attention import DecodeBatch, PrefillBatch
from kvscope_engine.model.layers.sampling.sampler import Sampler
from kvscope_engine.policy.request import Request
from kvscope_telemetry.messages.sampling_params import ResolvedSampling
from kvscope_telemetry.messages.telemetry import Progress

STAGE: Final = "warm up"
LONGEST_RUN: Final = 128
"""Number of queries of a request above which prefill uses no larger tiles. The longest possible requests are an
exception and have a separate warm-up step.
"""
NUM_CPU_QUERIES: Final = 8
"""Tokens of the prefill in the warm-up on a CPU: enough to run the matmuls of prefills, at the cost of a decode."""
EVERY_OPTION: Final = (
    ResolvedSampling(temperature=0.0),
    ResolvedSampling(temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, seed=1, logprobs=3),
    ResolvedSampling(temperature=0.7, top_p=0.9, seed=1, min_tokens=1),
    ResolvedSampling(temperature=0.7, seed=1, logit_bias={0: 1.0}),
    ResolvedSampling(temperature=0.7, seed=1, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1),
)

Run = Callable[[StepTensors], torch.Tensor]
"""Function that runs a step and returns the logits of all its rows."""


def warm_up(
    limits: StepLimits,
    run: Run,
    sampler: Sampler,
    buffer: StepBuffer,
    graphs: DecodeGraphs | None,
    piecewise_graphs: PiecewiseGraphs | None,
    progress: Callable[[Progress], None],
) -> str:
    """Run all warm-up steps, and capture the CUDA graphs in `graphs` (decodes) and `piecewise_graphs` (steps with
    prefills).

    Returns why graphs cannot be captured; empty if they were captured or none were requested.
    """
    steps = list(idle_steps(limits))
    total = len(steps) + (graphs is not None) + (piecewise_graphs is not None)
    logits = None
    for num_done, step in enumerate(steps):
        progress(Progress(stage=STAGE, detail="kernels", done=num_done, total=total))
        buffer.begin()
        tensors = step(buffer)
        buffer.send()
        logits = run(tensors)
    if logits is not None:
        _sample(logits, sampler, buffer)
    failure = ""
    if graphs is not None:
        progress(Progress(stage=STAGE, detail="CUDA graphs of decodes", done=len(steps), total=total))
        failure = graphs.capture_all()
    if piecewise_graphs is not None and not failure:
        progress(Progress(stage=STAGE, detail="CUDA graphs of steps with prefills", done=total - 1, total=total))
        piecewise_graphs.capture_all()
    if graphs is not None and graphs.drafted_sizes and not failure:
        progress(Progress(stage=STAGE, detail="CUDA graphs of steps with drafts", done=total - 1, total=total))
        graphs.capture_drafted()
    return failure


def idle_steps(limits: StepLimits) -> Iterator[Callable[[StepBuffer], StepTensors]]:
    """Yield functions that write a step into a buffer. Together, these steps launch every variant of every kernel.

    Prefill tiles grow with the longest query run, and short runs with long contexts are split.
    """
    max_queries = min(limits.max_num_batched_tokens, LONGEST_RUN)
    for num_queries in (
        *(1 << power for power in range(max_queries.bit_length()) if 1 << power < max_queries),
        max_queries,
    ):
        for length in dict.fromkeys((num_queries, max(num_queries, limits.max_request_tokens))):
            yield _prefill_step(num_queries, 0, length=length, num_groups=limits.num_groups)
    longest, num_seqs = limits.max_num_batched_tokens, limits.max_num_seqs
    yield _prefill_step(max_queries, 0, longest=longest, num_seqs=num_seqs, num_groups=limits.num_groups)
    if limits.has_experts:
        for num_tokens in dict.fromkeys(
            (*_doublings(max_queries, limits.max_num_batched_tokens), limits.max_num_batched_tokens)
        ):
            yield _prefill_step(num_tokens, 0, num_groups=limits.num_groups)
    yield _prefill_step(min(2, max_queries), 1, num_groups=limits.num_groups)
    for length in dict.fromkeys((1, limits.max_request_tokens)):  # unsplit, and split with a merge
        for num_rows in dict.fromkeys((1, min(2, limits.max_num_seqs))):
            yield _decode_step(num_rows, length, limits.block_size, limits.num_groups)


def warm_up_cpu(limits: StepLimits, run: Run | None, sampler: Sampler, buffer: StepBuffer, vocab_size: int) -> None:
    """Run a small step with a prefill and one with a decode, and sample with every option.

    The first run of a step reads all weights into memory, and allocates buffers of the operations. If `run` is None,
    only the sampler is run.
    """
    num_queries = min(NUM_CPU_QUERIES, limits.max_num_batched_tokens)
    steps = (
        _prefill_step(num_queries, 0, num_groups=limits.num_groups),
        _decode_step(1, 1, limits.block_size, limits.num_groups),
    )
    if run is not None:
        for step in steps:
            buffer.begin()
            tensors = step(buffer)
            buffer.send()
            run(tensors)
    _sample(torch.zeros(1, vocab_size), sampler, buffer)


def idle_decodes(limits: StepLimits, buffer: StepBuffer) -> StepTensors:
    """Write the smallest warm-up decode step with two requests (one, if `max_num_seqs` is 1) into `buffer`."""
    return _decode_step(min(2, limits.max_num_seqs), 1, limits.block_size, limits.num_groups)(buffer)


def _doublings(number: int, limit: int) -> Iterator[int]:
    while (number := 2 * number) < limit:
        yield number


def _decode_step(num_rows: int, length: int, block_size: int, num_groups: int) -> Callable[[StepBuffer], StepTensors]:
    def stage(buffer: StepBuffer) -> StepTensors:
        flat = _idle_tokens(num_rows, buffer, num_groups)
        return StepTensors(*flat, num_rows, _idle_decodes(num_rows, length, block_size, buffer, num_groups), None, None)

    return stage


def _prefill_step(
    num_queries: int,
    num_single_token: int,
    *,
    length: int | None = None,
    longest: int | None = None,
    num_seqs: int = 1,
    num_groups: int,
) -> Callable[[StepBuffer], StepTensors]:
    """Return a function that writes a step of tokens that belong to no sequence.

    Kernels are launched as for one sequence of `length` tokens, or for `num_seqs` sequences of `longest` queries each.
    """

    def stage(buffer: StepBuffer) -> StepTensors:
        flat = _idle_tokens(num_single_token + num_queries, buffer, num_groups)
        prefill = PrefillBatch(
            block_tables=(buffer.put(np.zeros((num_seqs, table_width(1, 1)), np.int32)),) * num_groups,
            seq_lens=buffer.put(np.zeros(num_seqs, np.int32)),
            max_seq_len=length or num_queries,
            query_start=buffer.put(np.zeros(num_seqs + 1, np.int32)),
            max_query_len=longest or num_queries,
        )
        decode = _idle_decodes(num_single_token, 1, 1, buffer, num_groups) if num_single_token else None
        return StepTensors(*flat, num_single_token, decode, prefill, None)

    return stage


def _idle_tokens(
    num_tokens: int, buffer: StepBuffer, num_groups: int
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    zeros = np.zeros(num_tokens, np.int64)
    return buffer.put(zeros), buffer.put(zeros), (buffer.put(np.full(num_tokens, -1, np.int64)),) * num_groups


def _idle_decodes(num_rows: int, length: int, block_size: int, buffer: StepBuffer, num_groups: int) -> DecodeBatch:
    tables = buffer.put(np.zeros((num_rows, table_width(length, block_size)), np.int32))
    return DecodeBatch((tables,) * num_groups, buffer.put(np.zeros(num_rows, np.int32)), length)


def _sample(logits: torch.Tensor, sampler: Sampler, buffer: StepBuffer) -> None:
    """Sample with every option, so that no library is loaded during service."""
    requests = [
        Request(
            number=-1 - index,
            request_id=STAGE,
            prompt_token_ids=[0],
            sampling=sampling,
            max_tokens=1,
            arrival_ns=0,
        )
        for index, sampling in enumerate(EVERY_OPTION)
    ]
    requests[0].matcher = _AnyToken()
    zeros = logits.new_zeros(len(requests), logits.shape[1])
    buffer.begin()
    inputs = sampler.inputs(requests, buffer, logits.shape[1])
    buffer.send()
    sampler.draw(zeros, inputs)
    for request in requests:
        sampler.forget(request)


class _AnyToken:
    is_ready = True
    has_ended = False

    def fill(self, bitmask: NDArray[np.int32], row: int, *, may_end: bool) -> None:
        bitmask[row] = -1

    def accept(self, token_id: int) -> None: ...
