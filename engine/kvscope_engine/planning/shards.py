"""How a model is divided among GPUs: matrices by tensor parallelism, consecutive layers by pipeline parallelism.

As in vLLM, after Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053): matrices are divided equally, vectors are
replicated, and KV heads are replicated if there are too few. Owns no dtype and no memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvscope_engine.model.kv_cache.kv_storage import LayerShape
from kvscope_engine.planning.skeleton import Parameters, Skeleton
from kvscope_telemetry.errors import BadInput


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """Part of the model on one GPU of a pipeline stage: numbers of parameters, and the KV cache's layers."""

    number: int
    first_layer: int
    layers: Parameters
    embedding: Parameters
    """Parameters of embedding and head. Their products stay in the activations' type when the layers' are quantized."""
    kv: tuple[LayerShape, ...]
    has_head: bool


def check_divisible(num_query_heads: int, tensor_parallel: int) -> None:
    """Raise BadInput if the query heads cannot be divided evenly."""
    if num_query_heads % tensor_parallel:
        raise BadInput(
            f"tensor_parallel={tensor_parallel} is not accepted: {num_query_heads} query heads are not divisible by it"
        )


def stages(
    skeleton: Skeleton, kv: tuple[LayerShape, ...], tensor_parallel: int, pipeline_parallel: int
) -> tuple[PipelineStage, ...]:
    """Return what a GPU of each stage holds, first to last. Raises BadInput for more stages than layers."""
    if pipeline_parallel > skeleton.num_layers:
        raise BadInput(
            f"pipeline_parallel={pipeline_parallel} is not accepted: the model has {skeleton.num_layers} layers"
        )
    result, first = [], 0
    for number, count in enumerate(_layer_counts(skeleton.num_layers, pipeline_parallel)):
        is_last = number == pipeline_parallel - 1
        end_parameters = Parameters()
        if number == 0 or (is_last and not skeleton.head.matrices):
            end_parameters += skeleton.embedding  # tied weights: the stage with the head needs the embedding as well
        if is_last:
            end_parameters += skeleton.head
        layer_parameters = sum(skeleton.layers[first : first + count], Parameters())
        result.append(
            PipelineStage(
                number,
                first,
                _divided(layer_parameters, tensor_parallel),
                _divided(end_parameters, tensor_parallel),
                tuple(_kv_part(layer, tensor_parallel, first) for layer in kv[first : first + count]),
                is_last,
            )
        )
        first += count
    return tuple(result)


def _layer_counts(num_layers: int, num_stages: int) -> list[int]:
    """Return the layers of each stage, as even as possible.

    Extra layers go to stages before the last, which has the head.
    """
    base, num_extra = divmod(num_layers, num_stages)
    counts = [base] * num_stages
    for index in range(num_extra):
        counts[-2 - index if num_stages > 1 else 0] += 1
    return counts


def _divided(parameters: Parameters, parts: int) -> Parameters:
    return Parameters(-(-parameters.matrices // parts), parameters.vectors)


def _kv_part(layer: LayerShape, parts: int, first: int) -> LayerShape:
    """Return one GPU's part of a layer, in the stage that starts with layer `first`.

    If the layer shares the KV of a layer of an earlier stage, the stage stores it itself.
    """
    source = layer.shares_with
    own = None if source is None or source < first else source - first
    return replace(layer, num_kv_heads=max(1, layer.num_kv_heads // parts), shares_with=own)
