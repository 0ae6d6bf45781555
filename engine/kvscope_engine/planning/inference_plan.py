"""Memory that serving a model takes on each GPU, and how many tokens and requests fit into the remaining memory.

Adds up the same quantities and reserves as the engine (`model/device_memory/memory_plan.py`). Quantities that the
engine measures at its start are estimated here.

- Weights: number of parameters times their bytes.
- KV: two vectors per head, layer and token, each with a float32 scale if stored in 8 bits. Blocks are counted by KV
  group, as in the engine; layers with a window hold few.
- Activations: transformers' forward pass of the largest step, run without data.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kvscope_engine.model.device_memory.memory_plan import MemoryPlan, StepReserves, drop_large_piecewise_graphs
from kvscope_engine.model.hf_config import position_limit
from kvscope_engine.model.input_batch.step_limits import StepLimits
from kvscope_engine.model.kv_cache.kv_offload.tier_builder import STAGING_BYTES
from kvscope_engine.model.kv_cache.kv_storage import QUANTIZED_DTYPES, block_bytes, storage_dtype
from kvscope_engine.model.kv_cache.layer_groups import LayerGroup, group_layers
from kvscope_engine.model.kv_cache.state_storage import (
    LayerState,
    state_bytes,
)
from kvscope_engine.model.layers.attention.no_attention import NoAttention
from kvscope_engine.model.layers.attention.paged_attention import register_attention
from kvscope_engine.model.layers.forward import Forward
from kvscope_engine.model.layers.own_forward import own_forward, states_of
from kvscope_engine.model.runner.kv_cache_spec import expanded_layers, rules_of
from kvscope_engine.model.runner.step_memory import (
    FLOAT32_BYTES,
    GPU_BATCHED_TOKENS,
    GRAPH_BYTES,
    Processors,
    graph_tensor_bytes,
    head_shape,
    latent_bytes,
    piecewise_bytes,
    sampling_bytes,
    split_partials_bytes,
    step_buffer_bytes,
)
from kvscope_engine.model.verification.hook_check import LayerCall, record_calls
from kvscope_engine.planning.live_memory import LiveMemory
from kvscope_engine.planning.shards import PipelineStage, check_divisible, pipeline_stages
from kvscope_engine.planning.skeleton import Skeleton, build_model
from kvscope_engine.policy.block_needs import BlockNeeds, num_blocks_for
from kvscope_engine.policy.state_slots import MIN_SLOTS, host_slots, slots_and_blocks
from kvscope_telemetry.errors import BadInput, KvscopeError
from kvscope_telemetry.messages.memory_plan import WEIGHT_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvscope_engine.model.kv_cache.kv_storage import LayerShape

CONTEXT_BYTES: Final = 800 << 20
"""Bytes that the driver, the CUDA context and libraries take on a GPU: 0.8 GiB as measured on H100 and H200."""
ASSUMED_PROCESSORS: Final = Processors(num_multiprocessors=132, capability=90)
"""Properties of an H100, assumed when sizing the partial results of split attention, which are small."""
WEIGHTS_PER_SCALE: Final = {"int8": 128, "fp8": 4096, "int4": 128}
"""Number of quantized weights per scale: the size of a group; for FP8, roughly the smallest row."""
RECURRENT_TOKENS: Final = 256
"""Maximum number of tokens in the run without data if some layers process tokens one by one.

Memory for more tokens is extrapolated.
"""
SCALE_BYTES: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceQuestion:
    """Options of a plan for serving a model, named like the engine's options."""

    gpu_memory: int
    gpu_memory_utilization: float = 0.9
    dtype: str = "bfloat16"
    """Data type of unquantized weights. Models with quantized weights compute in bfloat16."""
    kv_cache_dtype: str = "auto"
    block_size: int = 16
    max_model_len: int | None = None
    """Maximum number of tokens of a request; None for the model's maximum."""
    max_num_seqs: int = 64
    max_num_batched_tokens: int = GPU_BATCHED_TOKENS
    enforce_eager: bool = False
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    kv_host_memory: int = 0
    weights_on_host: int = 0
    """Bytes of weights per GPU that stay in host memory and are transferred in each step."""
    others: int = CONTEXT_BYTES

    def __post_init__(self) -> None:
        if self.dtype not in WEIGHT_BYTES:
            raise BadInput(f"dtype={self.dtype!r} is not accepted: must be one of {', '.join(WEIGHT_BYTES)}")
        for name in ("tensor_parallel", "pipeline_parallel", "max_num_seqs", "max_num_batched_tokens", "block_size"):
            value = getattr(self, name)
            if not 1 <= value <= 1 << 20:
                raise BadInput(f"{name}={value} is not accepted: must be a whole number from 1 to {1 << 20}")
        if self.max_model_len is not None and not 1 <= self.max_model_len <= 1 << 31:
            raise BadInput(
                f"max_model_len={self.max_model_len} is not accepted: must be a whole number from 1 to {1 << 31}"
            )
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise BadInput(
                f"gpu_memory_utilization={self.gpu_memory_utilization!r} is not accepted: above 0, at most 1"
            )
        if self.kv_cache_dtype != "auto" and self.kv_cache_dtype not in QUANTIZED_DTYPES:
            raise BadInput(
                f"kv_cache_dtype={self.kv_cache_dtype!r} is not accepted:"
                f" must be one of auto, {', '.join(QUANTIZED_DTYPES)}"
            )

    @property
    def activations(self) -> torch.dtype:
        return {"float32": torch.float32, "float16": torch.float16}.get(self.dtype, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class StagePlan:
    stage: PipelineStage
    memory: MemoryPlan
    block_bytes: int
    num_blocks: int
    """Number of KV blocks that fit; 0 if not even one fits."""
    num_host_blocks: int
    groups: tuple[LayerGroup, ...]
    needs: BlockNeeds
    """Computes the number of blocks, over all KV groups, that a request holds once its prompt is computed."""
    num_states: int = 0
    """Number of slots for recurrent states on the GPU, for running requests and cached prefixes."""
    state_bytes: int = 0
    num_host_states: int = 0
    """Number of recurrent-state slots in host memory, for swapped-out requests and for cached prefixes."""
    host_state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class InferencePlan:
    """Result of a plan for serving a model.

    `stages` describes one GPU of each pipeline stage. The stage with the fewest blocks limits all of them.
    """

    question: InferenceQuestion
    skeleton: Skeleton
    max_model_len: int
    stages: tuple[StagePlan, ...]
    expansion_factor: float = 1.0
    """Factor by which the KV of a model with latents (MLA) would grow if keys and values were stored."""
    own_forward_reason: str = ""
    """Why the engine runs the model with transformers' own code; empty if the engine uses kvscope's attention."""
    index_bytes: int = 0
    """Bytes per token that indexers (sparse attention) store, in all layers."""

    @property
    def tightest(self) -> StagePlan:
        return min(self.stages, key=lambda stage: (stage.num_blocks, stage.memory.kv))

    @property
    def num_blocks(self) -> int:
        return self.tightest.num_blocks

    @property
    def num_tokens(self) -> int:
        """Maximum number of tokens in the KV cache, over all requests.

        If layers have a window, this is the number for requests of the maximum length.
        """
        if not self.has_windows:
            return self.num_blocks * self.question.block_size
        return int(self.num_blocks / self.tightest.needs.max_blocks(self.max_model_len) * self.max_model_len)

    @property
    def has_windows(self) -> bool:
        """Whether some layers have a window shorter than the longest request, so that blocks are freed while
        such a request runs.
        """
        return any(group.rule.window for stage in self.stages for group in stage.groups)

    def request_bytes(self, length: int) -> int:
        """Return the KV bytes of one request of `length` tokens, summed over all GPUs."""
        rank_bytes = sum(stage.needs.max_blocks(length) * stage.block_bytes for stage in self.stages)
        return rank_bytes * self.question.tensor_parallel

    def unfreed_bytes(self, length: int) -> int:
        """Return the KV bytes of one request of `length` tokens if windows freed no blocks, summed over all GPUs."""
        dtype = storage_dtype(self.question.kv_cache_dtype, self.question.activations)
        one_block = sum(block_bytes(stage.stage.kv, self.question.block_size, dtype) for stage in self.stages)
        return num_blocks_for(length, self.question.block_size) * one_block * self.question.tensor_parallel

    def num_requests_of(self, request_bytes: float) -> int:
        """Return how many requests fit that hold `request_bytes` each, summed over all GPUs."""
        available_bytes = (
            sum(stage.num_blocks * stage.block_bytes for stage in self.stages) * self.question.tensor_parallel
        )
        return int(available_bytes // request_bytes) if request_bytes else 0

    @property
    def kv_bytes_a_token(self) -> float:
        """KV bytes per token, summed over all GPUs. Replicated KV heads count on each GPU.

        If layers have a window, this is the mean over the tokens of a request of the maximum length.
        """
        if self.has_windows:
            return self.request_bytes(self.max_model_len) / self.max_model_len
        block_bytes = sum(stage.block_bytes for stage in self.stages) * self.question.tensor_parallel
        return block_bytes / self.question.block_size

    @property
    def fits(self) -> bool:
        """Whether the weights, the largest step and at least one block fit in the GPU's memory."""
        return all(stage.memory.fits and stage.num_blocks > 0 for stage in self.stages)

    @property
    def fits_longest_request(self) -> bool:
        """Whether a single request of `max_model_len` tokens fits."""
        return self.fits and self.requests(self.max_model_len) >= 1

    def requests(self, length: int) -> int:
        """Return how many requests of `length` tokens, prompt and output, can run concurrently without sharing
        blocks.
        """
        fitting = min(stage.num_blocks // max(1, stage.needs.max_blocks(length)) for stage in self.stages)
        return min(fitting, max(0, self.tightest.num_states - 1)) if self.tightest.num_states else fitting


def plan_inference(skeleton: Skeleton, question: InferenceQuestion) -> InferencePlan:
    """Plan the memory of each GPU.

    Raises:
        BadInput: The model does not support the length, its heads or layers cannot be divided among the GPUs, or the
            engine does not serve the model.
    """
    length = _checked_length(skeleton, question)
    tokens = min(question.max_num_batched_tokens, length * question.max_num_seqs)
    shape = forward_shape(skeleton, question.activations, tokens, length)
    if shape.states and question.tensor_parallel * question.pipeline_parallel > 1:
        raise BadInput(f"model {skeleton.name!r} has recurrent layers, which run on one GPU alone")
    if shape.own_forward_reason:
        _check_own_forward(skeleton.name, shape, question)
    if shape.calls:
        check_divisible(shape.calls[0].num_query_heads, question.tensor_parallel)
    layers = tuple(shape.layers)
    divided = pipeline_stages(skeleton, layers, question.tensor_parallel, question.pipeline_parallel)
    stage_plans = tuple(_stage_plan(skeleton, stage, shape, question, length, tokens) for stage in divided)
    dtype = storage_dtype(question.kv_cache_dtype, question.activations)
    index_bytes = sum(layer.index_bytes(dtype) for layer in layers)
    expansion = _expansion(shape.calls, question.tensor_parallel)
    return InferencePlan(question, skeleton, length, stage_plans, expansion, shape.own_forward_reason, index_bytes)


def _check_own_forward(name: str, shape: ForwardShape, question: InferenceQuestion) -> None:
    """Raise BadInput for options that are not supported for a model run by transformers' own code.

    Tensor parallelism is accepted only if all layers store latents. The plan then describes vLLM and SGLang, which
    replicate latents on each GPU.
    """
    if question.kv_cache_dtype != "auto":
        raise BadInput(
            f"kv_cache_dtype={question.kv_cache_dtype!r} is not accepted: model {name!r} is run by transformers' own"
            " code"
        )
    if question.tensor_parallel > 1 and not all(layer.latent_dim for layer in shape.layers):
        raise BadInput(f"model {name!r} is run by transformers' own code, on one GPU alone")


def _expansion(calls: Sequence[LayerCall], num_ranks: int) -> float:
    """Return the factor by which the KV of a model with latents (MLA) would grow if keys and values were stored.

    Latents are replicated on all ranks; heads would be divided among them.
    """
    num_elements = sum(call.shape.num_elements / (1 if call.shape.latent_dim else num_ranks) for call in calls)
    return (
        sum(shape.num_elements / num_ranks for shape in expanded_layers(calls)) / num_elements if num_elements else 1.0
    )


def weight_bytes(stage: PipelineStage, dtype: str) -> int:
    matrix_bytes = vector_bytes = WEIGHT_BYTES[dtype]
    if dtype in WEIGHTS_PER_SCALE:
        matrix_bytes, vector_bytes = matrix_bytes + SCALE_BYTES / WEIGHTS_PER_SCALE[dtype], 2.0
    return round(stage.layers.matrices * matrix_bytes + (stage.layers.vectors + stage.embedding.total) * vector_bytes)


def _checked_length(skeleton: Skeleton, question: InferenceQuestion) -> int:
    limit = position_limit(skeleton.config)
    if question.max_model_len is None:
        if limit is None:
            raise BadInput(f"model {skeleton.name!r} does not state its context length: give --max-model-len")
        return limit
    if limit is not None and question.max_model_len > limit:
        raise BadInput(
            f"max_model_len={question.max_model_len} is not accepted: model {skeleton.name!r} can do {limit}"
        )
    return question.max_model_len


def _stage_plan(
    skeleton: Skeleton, stage: PipelineStage, shape: ForwardShape, question: InferenceQuestion, length: int, tokens: int
) -> StagePlan:
    dtype = storage_dtype(question.kv_cache_dtype, question.activations)
    rules = rules_of(shape.calls[stage.first_layer :])
    groups = group_layers(rules[: len(stage.kv)], stage.kv, length)
    one_block = block_bytes(stage.kv, question.block_size, dtype, [group.layers for group in groups])
    needs = BlockNeeds([group.rule for group in groups], question.block_size, 1)
    num_pads = int(bool(shape.states) and not question.enforce_eager and not shape.own_forward_reason)
    memory = drop_large_piecewise_graphs(
        MemoryPlan(
            total=question.gpu_memory,
            utilization=question.gpu_memory_utilization,
            others=question.others,
            weights=max(0, weight_bytes(stage, question.dtype) - question.weights_on_host),
            activations=_activations(skeleton, shape, question, tokens),
            logits=0,
            reserves=_reserves(skeleton, stage, shape, question, length, len(groups)),
            staging=2 * STAGING_BYTES if question.kv_host_memory else 0,
            kv_min=one_block + (MIN_SLOTS + num_pads) * shape.state_bytes,
        )
    )
    available_bytes = max(0, memory.kv) if memory.fits else 0
    if not shape.states:
        return StagePlan(
            stage, memory, one_block, available_bytes // one_block, question.kv_host_memory // one_block, groups, needs
        )
    request_blocks = num_blocks_for(length, question.block_size)
    wanted_slots = 2 * question.max_num_seqs
    slots, blocks = slots_and_blocks(
        available_bytes, one_block, shape.state_bytes, wanted_slots, request_blocks, num_pads
    )
    num_host_states = host_slots(question.kv_host_memory, one_block, shape.state_bytes, wanted_slots)
    host_state_bytes = num_host_states * shape.state_bytes
    num_host_blocks = (question.kv_host_memory - host_state_bytes) // one_block if one_block else 0
    states = (slots, (slots + num_pads) * shape.state_bytes, num_host_states, host_state_bytes)
    return StagePlan(stage, memory, one_block, blocks, num_host_blocks, groups, needs, *states)


def _activations(skeleton: Skeleton, shape: ForwardShape, question: InferenceQuestion, tokens: int) -> int:
    """Return the activation bytes of the largest step.

    Tensor parallelism divides everything but the residual stream before and after each layer. For 16-bit models the
    engine stores that stream in float32.
    """
    itemsize = question.activations.itemsize
    numbers = 2 * tokens * int(skeleton.config.hidden_size)
    stream = numbers * itemsize
    inner = max(0, shape.activations - stream) // question.tensor_parallel
    return inner + numbers * FLOAT32_BYTES


def _reserves(
    skeleton: Skeleton,
    stage: PipelineStage,
    shape: ForwardShape,
    question: InferenceQuestion,
    length: int,
    num_groups: int,
) -> StepReserves:
    limits = StepLimits(
        max_num_seqs=question.max_num_seqs,
        max_num_batched_tokens=question.max_num_batched_tokens,
        max_request_tokens=length,
        block_size=question.block_size,
        num_groups=num_groups,
    )
    heads = head_shape(
        shape.calls,
        question.activations.itemsize,
        is_quantized=question.kv_cache_dtype != "auto",
        num_ranks=question.tensor_parallel,
    )
    vocab = int(skeleton.config.vocab_size) if stage.has_head else 0
    is_eager = question.enforce_eager or bool(shape.own_forward_reason)
    graphs = 0 if is_eager else GRAPH_BYTES + graph_tensor_bytes(limits, vocab)
    return StepReserves(
        attention_partials=split_partials_bytes(limits, heads, ASSUMED_PROCESSORS) + latent_bytes(limits, heads),
        graphs=graphs + step_buffer_bytes(limits, vocab),
        piecewise_graphs=0 if is_eager or shape.states else piecewise_bytes(limits, heads),
        sampling=sampling_bytes(limits, vocab),
    )


@dataclass(frozen=True, slots=True)
class ForwardShape:
    """Peak memory of a model's forward pass over some tokens, and what its layers store. Measured by running
    transformers' own code on tensors without data.
    """

    calls: tuple[LayerCall, ...]
    activations: int
    """Peak bytes of activations, without the LM head."""
    states: tuple[LayerState, ...] = ()
    own_forward_reason: str = ""
    """Why the engine runs the model with transformers' own code; empty if it uses kvscope's attention."""

    @property
    def state_bytes(self) -> int:
        return state_bytes(self.states)

    @property
    def layers(self) -> Sequence[LayerShape]:
        return [call.shape for call in self.calls]


@lru_cache(maxsize=16)
def forward_shape(skeleton: Skeleton, dtype: torch.dtype, num_tokens: int, length: int = 0) -> ForwardShape:
    """Run `num_tokens` tokens through a model whose tensors have no data. The tokens belong to requests of up to
    `length` tokens; if `length` is 0, it is `num_tokens`.

    Raises BadInput if the engine would refuse the model.
    """
    register_attention()
    with FakeTensorMode(), torch.inference_mode():
        module = build_model(skeleton.whole, dtype, torch.device("cpu")).eval()
        try:
            calls = record_calls(module)
            states, own = tuple(states_of(module)), own_forward(module)
            num_run = min(num_tokens, RECURRENT_TOKENS) if states and own is None else num_tokens
            ids = torch.zeros(num_run, dtype=torch.int64)
            with LiveMemory() as memory:
                memory.assign("weights", [*module.parameters(), *module.buffers()])
                memory.reset_peak()
                Forward(module).fill(ids, ids, NoAttention(length))
        except KvscopeError as error:
            raise BadInput(f"model {skeleton.name!r} is not supported: {error}") from error
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:  # external model code may raise these
            line = " ".join(str(error).split())
            raise BadInput(f"model {skeleton.name!r} cannot be planned: {type(error).__name__}: {line:.200}") from error
    activations = round(memory.peak["activations"] * num_tokens / num_run)
    return ForwardShape(calls, activations, states, own.reason if own is not None else "")
