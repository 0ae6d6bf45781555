"""What a forward pass holds at its peak, and its layers keep: transformers' own code run on tensors without data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kvscope_engine.model.checks.hook_check import LayerCall, seen_calls
from kvscope_engine.model.running.attention import register_attention
from kvscope_engine.model.running.forward import Forward
from kvscope_engine.model.running.profile_run import NoAttention
from kvscope_engine.planning.live_memory import LiveMemory
from kvscope_engine.planning.skeleton import Skeleton, build
from kvscope_telemetry.errors import BadInput, KvscopeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvscope_engine.model.running.kv_storage import LayerShape


@dataclass(frozen=True, slots=True)
class ForwardShape:
    """Of a model's forward pass over some tokens."""

    calls: tuple[LayerCall, ...]
    """How each layer calls its attention."""
    activations: int
    """Bytes at the peak, without the head."""

    @property
    def layers(self) -> Sequence[LayerShape]:
        """The KV cache of each layer."""
        return [call.shape for call in self.calls]


@lru_cache(maxsize=16)
def forward_shape(skeleton: Skeleton, dtype: torch.dtype, num_tokens: int) -> ForwardShape:
    """Run `num_tokens` through a model without data. Raises BadInput where the engine would refuse it."""
    register_attention()
    with FakeTensorMode(), torch.inference_mode():
        module = build(skeleton.config, dtype, torch.device("cpu")).eval()
        try:
            calls = seen_calls(module)
            ids = torch.zeros(num_tokens, dtype=torch.int64)
            with LiveMemory() as memory:
                memory.name("weights", [*module.parameters(), *module.buffers()])
                memory.restart_peak()
                Forward(module).fill(ids, ids, NoAttention())
        except KvscopeError as error:
            raise BadInput(f"model {skeleton.name!r} is not supported: {error}") from error
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:  # a foreign model raises what it likes
            line = " ".join(str(error).split())
            raise BadInput(f"model {skeleton.name!r} cannot be planned: {type(error).__name__}: {line:.200}") from error
    return ForwardShape(calls, round(memory.peak["activations"]))
