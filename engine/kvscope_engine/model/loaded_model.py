"""Defines `LoadedModel`, the loader's result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from kvscope_engine.model.distributed.rank import ALONE, Rank
from kvscope_engine.model.distributed.shard import LinearSharding
from kvscope_engine.tokenization.tokenizer import Tokenizer
from kvscope_telemetry.messages.telemetry import ModelInfo

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run on its device: in evaluation mode, with fixed weights and kvscope's attention in every
    layer.
    """

    module: torch.nn.Module
    hf_config: PretrainedConfig
    tokenizer: Tokenizer | None
    info: ModelInfo
    eos_token_ids: frozenset[int]
    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    """Maximum number of tokens of a request's prompt and output together."""
    quantization: str = "none"
    """Weight format used for computing, as returned by `choose_quantization`."""
    notes: tuple[str, ...] = ()
    """Lines of text for the user about how the weights were loaded."""
    fingerprint: str = ""
    """Hash of the configuration and the loaded weights; empty unless KV on disk persists between starts."""
    identity: str = ""
    """Text of everything that determines the weights and the code on this machine, under which results of checks are
    stored (`model_identity`). Empty if nothing may be stored: on a GPU, with several ranks, weights in host memory, or
    random weights.
    """
    rank: Rank = ALONE
    shardings: Mapping[str, LinearSharding] = field(default_factory=dict)
    """Sharding of the linear layers by name; empty with a single rank."""

    @property
    def num_layers(self) -> int:
        """Number of attention layers, each with its own KV cache."""
        return self.info.num_layers

    @property
    def num_query_heads(self) -> int:
        """Number of query heads per layer on this rank."""
        return self.info.num_query_heads // self.rank.count

    @property
    def num_kv_heads(self) -> int:
        """Number of key and value heads per layer on this rank."""
        return max(1, self.info.num_kv_heads // self.rank.count)

    @property
    def head_dim(self) -> int:
        return self.info.head_dim
