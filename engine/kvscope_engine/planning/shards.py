"""Divides a model among GPUs: matrices by tensor parallelism, consecutive layers by pipeline parallelism.

The rules are those of vLLM, which follow Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053): matrices are divided
equally, vectors are replicated, and KV heads are replicated if there are fewer heads than ranks. Independent of dtypes
and of memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvscope_engine.model.kv_cache.kv_storage import LayerShape
from kvscope_engine.planning.skeleton import Parameters, Skeleton
from kvscope_telemetry.errors import BadInput


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """Number of parameters, and the KV cache of the layers, on one GPU of a pipeline stage."""

    number: int
    first_layer: int
    layers: Parameters
    embedding: Parameters
    """Number of parameters of the embedding and the LM head, as far as this stage has them. They stay unquantized when
    the layers are quantized.
    """
    kv: tuple[LayerShape, ...]
    has_head: bool


def check_divisible(num_query_heads: int, tensor_parallel: int) -> None:
    if num_query_heads % tensor_parallel:
        raise BadInput(
            f"tensor_parallel={tensor_parallel} is not accepted: {num_query_heads} query heads are not divisible by it"
        )


def pipeline_stages(
    skeleton: Skeleton, kv: tuple[LayerShape, ...], tensor_parallel: int, pipeline_parallel: int
) -> tuple[PipelineStage, ...]:
    """Return the stages, first to last, each with the parameters on one of its GPUs.

    Raises BadInput for more stages than layers.
    """
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
    """Return the number of layers of each stage, as even as possible.

    Extra layers are assigned to stages before the last one, which has the LM head.
    """
    base, num_extra = divmod(num_layers, num_stages)
    counts = [base] * num_stages
    for index in range(num_extra):
        counts[-2 - index if num_stages > 1 else 0] += 1
    return counts


def _divided(parameters: Parameters, parts: int) -> Parameters:
    return Parameters(-(-parameters.matrices // parts), parameters.vectors)


def _kv_part(layer: LayerShape, parts: int, first: int) -> LayerShape:
    """Return the shape of a layer on one of `parts` GPUs, in a stage that starts with layer `first`.

    A layer that shares the KV of a layer in an earlier stage stores a copy in this stage.
    """
    source = layer.shares_with
    own = None if source is None or source < first else source - first
    return replace(layer, num_kv_heads=max(1, layer.num_kv_heads // parts), shares_with=own)
