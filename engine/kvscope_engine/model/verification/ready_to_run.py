"""What is done to a loaded model before it runs, in the order in which each step can still be proven.

Owns that order: our attention is put in and proven, then parts are joined and the whole is proven again. Whatever else
changes the model, such as its head, belongs between the two: afterwards plain weights are gone. What of them is in host
memory is streamed from then on.
"""

from __future__ import annotations

from torch import nn

from kvscope_engine.model.cpu_offload.streaming import start_streaming
from kvscope_engine.model.layers.fused.float32_head import use_float32_logits
from kvscope_engine.model.verification.fuse import Fused, fuse_model
from kvscope_engine.model.verification.hook_check import check_hook


def make_ready_to_run(module: nn.Module, quantization: str = "none") -> Fused:
    """In place; asked again, it says what was done. Raises BadInput naming an architecture that cannot be served."""
    check_hook(module)
    use_float32_logits(module)
    fused = fuse_model(module, quantization)
    start_streaming(module)
    return fused
