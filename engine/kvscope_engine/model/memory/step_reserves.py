"""What a step on a GPU takes that a profile of one step does not show, from the configuration and the model.

Owns the sums for the tensors that the runner, its graphs and the kernels make for themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvscope_engine.config import EngineConfig
from kvscope_engine.model.memory.memory_plan import StepReserves

if TYPE_CHECKING:
    from kvscope_engine.model.loading.loader import LoadedModel

MAX_GRAPH_BATCH: Final = 256
GRAPH_BYTES: Final = 256 << 20
"""Of all graphs together: their nodes, and what they keep between them."""
PARTIAL_TOKENS: Final = 512
"""Attention of a decode is split into parts of at least so many tokens, each with a float32 result a head."""


def step_reserves(config: EngineConfig, loaded: LoadedModel) -> StepReserves:
    """For the largest batch of decodes that has graphs, at the model's full length."""
    batch = min(config.max_num_seqs, MAX_GRAPH_BATCH)
    splits = -(-loaded.max_model_len // PARTIAL_TOKENS)
    partials = batch * loaded.num_query_heads * splits * (loaded.head_dim + 1) * 4
    tables = batch * -(-loaded.max_model_len // config.block_size) * 4
    logits = batch * loaded.info.vocab_size * 4
    return StepReserves(attention_partials=partials, graphs=GRAPH_BYTES + tables + logits)
