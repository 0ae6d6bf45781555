"""How a model is divided among GPUs: each matrix by tensor parallelism, the layers in a row by pipeline parallelism.

As vLLM does it, after Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053): matrices in equal parts, vectors whole on
each; a KV head that there are too few of is held by several. Owns no dtype and no memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvscope_engine.model.kv_cache.kv_storage import LayerShape
from kvscope_engine.planning.skeleton import Parameters, Skeleton
from kvscope_telemetry.errors import BadInput


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """What one GPU of a pipeline stage holds: numbers of parameters, and the KV cache's layers."""

    number: int
    first_layer: int
    layers: Parameters
    embedding: Parameters
    """With the head: products by these stay in the type of the activations when the layers' are quantized."""
    kv: tuple[LayerShape, ...]
    has_head: bool


def check_divisible(num_query_heads: int, tensor_parallel: int) -> None:
    """Raise BadInput where heads cannot be dealt out evenly."""
    if num_query_heads % tensor_parallel:
        raise BadInput(
            f"tensor_parallel={tensor_parallel} is not accepted: {num_query_heads} query heads are not divisible by it"
        )


def stages(
    skeleton: Skeleton, kv: tuple[LayerShape, ...], tensor_parallel: int, pipeline_parallel: int
) -> tuple[PipelineStage, ...]:
    """A GPU of each stage, first to last. Raises BadInput for more stages than layers."""
    if pipeline_parallel > skeleton.num_layers:
        raise BadInput(
            f"pipeline_parallel={pipeline_parallel} is not accepted: the model has {skeleton.num_layers} layers"
        )
    made, first = [], 0
    for number, count in enumerate(_layer_counts(skeleton.num_layers, pipeline_parallel)):
        is_last = number == pipeline_parallel - 1
        ends = Parameters()
        if number == 0 or (is_last and not skeleton.head.matrices):
            ends += skeleton.embedding  # tied: whoever has the head has it too
        if is_last:
            ends += skeleton.head
        own = sum(skeleton.layers[first : first + count], Parameters())
        made.append(
            PipelineStage(
                number,
                first,
                _divided(own, tensor_parallel),
                _divided(ends, tensor_parallel),
                tuple(_kv_part(layer, tensor_parallel, first) for layer in kv[first : first + count]),
                is_last,
            )
        )
        first += count
    return tuple(made)


def _layer_counts(num_layers: int, num_stages: int) -> list[int]:
    """As even as can be; those over go to the stages before the last, which has the head."""
    each, over = divmod(num_layers, num_stages)
    counts = [each] * num_stages
    for index in range(over):
        counts[-2 - index if num_stages > 1 else 0] += 1
    return counts


def _divided(parameters: Parameters, parts: int) -> Parameters:
    return Parameters(-(-parameters.matrices // parts), parameters.vectors)


def _kv_part(layer: LayerShape, parts: int, first: int) -> LayerShape:
    """A layer of the stage that begins with layer `first`; what it shares with an earlier stage it holds itself."""
    source = layer.shares_with
    own = None if source is None or source < first else source - first
    return replace(layer, num_kv_heads=max(1, layer.num_kv_heads // parts), shares_with=own)
