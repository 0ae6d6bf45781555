"""A model on its device, as the loader returns it and as all that runs it is given it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from kvscope_engine.model.distributed.rank import ALONE, Rank
from kvscope_engine.model.distributed.shard import Cut
from kvscope_engine.tokenization.tokenizer import Tokenizer
from kvscope_telemetry.messages.telemetry import ModelInfo

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run: evaluated only, its weights fixed, every attention layer calling ours."""

    module: torch.nn.Module
    hf_config: PretrainedConfig
    tokenizer: Tokenizer | None
    info: ModelInfo
    eos_token_ids: frozenset[int]
    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    """Tokens of prompt and output together."""
    quantization: str = "none"
    """Name of the format in which the weights are computed with, as `choose_quantization` returns it."""
    notes: tuple[str, ...] = ()
    """Lines that a person should read about how the weights came."""
    fingerprint: str = ""
    """Hash of the configuration and the loaded weights; empty unless KV is kept on disk between starts."""
    rank: Rank = ALONE
    """The tensor-parallel rank whose share of the weights this is."""
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    """How its linear layers are shared out, by name; nothing where this rank is alone."""

    @property
    def num_layers(self) -> int:
        """Attention layers, each with a KV cache of its own."""
        return self.info.num_layers

    @property
    def num_query_heads(self) -> int:
        """Query heads of a layer, on this rank."""
        return self.info.num_query_heads // self.rank.count

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads of a layer, on this rank."""
        return max(1, self.info.num_kv_heads // self.rank.count)

    @property
    def head_dim(self) -> int:
        """Numbers in a key, and in a value, of one head."""
        return self.info.head_dim
