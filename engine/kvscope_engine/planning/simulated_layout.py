"""KV groups and recurrent states of a model, from its configuration alone, for the simulator."""

from __future__ import annotations

import torch

from kvscope_engine.model.kv_cache.kv_storage import block_bytes, storage_dtype
from kvscope_engine.model.kv_cache.layer_groups import LayerGroup, group_layers
from kvscope_engine.model.runner.kv_cache_spec import expanded_layers, rules_of
from kvscope_engine.planning.inference_plan import forward_shape
from kvscope_engine.planning.skeleton import read_skeleton
from kvscope_engine.policy.kv_groups import GroupRule
from kvscope_engine.simulator.kv_layout import KVLayout, SimulatedGroup

_PROBE_TOKENS = 16
"""Number of tokens of the forward pass that records how each layer calls its attention."""


def model_layout(model: str, max_tokens: int, block_size: int, kv_cache_dtype: str = "auto") -> KVLayout:
    """Return the layout of `model`, named as for the command `plan`, for requests of up to `max_tokens` tokens.

    Raises BadInput for a model that the engine does not serve.
    """
    shape = forward_shape(read_skeleton(model), torch.bfloat16, _PROBE_TOKENS)
    layers, expanded_shapes = list(shape.layers), expanded_layers(shape.calls)
    dtype = storage_dtype(kv_cache_dtype, torch.bfloat16)

    def simulated_group(group: LayerGroup) -> SimulatedGroup:
        own, rule = [layers[number] for number in group.layers], group.rule
        is_latent = bool(own) and all(layer.latent_dim for layer in own)
        expanded = [expanded_shapes[number] for number in group.layers] if is_latent else []
        kind = "latent" if is_latent else "full"
        return SimulatedGroup(
            kind="chunked" if rule.is_chunked else "window" if rule.window else kind,
            rule=rule,
            num_layers=len(own),
            token_bytes=block_bytes(own, block_size, dtype) / block_size,
            expanded_bytes=block_bytes(expanded, block_size, dtype) / block_size,
        )

    groups = tuple(map(simulated_group, group_layers(rules_of(shape.calls), layers, max_tokens))) if layers else ()
    return KVLayout(groups or (SimulatedGroup("full", GroupRule(), 0, 0.0),), shape.state_bytes)
