"""Prepares a loaded model to run, in an order in which each change can still be checked.

kvscope's attention is installed and checked first; then parts are fused and the whole model is checked again. Other
changes of the model, such as those of the LM head, must come between the two, because unfused weights are released
afterwards. From then on, weights in host memory are streamed.
"""

from __future__ import annotations

from torch import nn

from kvscope_engine.model.cpu_offload.streaming import start_streaming
from kvscope_engine.model.layers.fused.float32_head import use_float32_logits
from kvscope_engine.model.verification.fuse import FusedCounts, fuse_model
from kvscope_engine.model.verification.hook_check import check_hook
from kvscope_engine.model.verification.passed_checks import PassedChecks


def make_ready_to_run(module: nn.Module, quantization: str = "none", passed: PassedChecks | None = None) -> FusedCounts:
    """Prepare `module`, in place. Further calls return the first result. Raises BadInput for unsupported
    architectures.

    Checks whose results `passed` has from an earlier start are not repeated.
    """
    passed = passed or PassedChecks()
    check_hook(module, passed)
    use_float32_logits(module)
    fused = fuse_model(module, quantization, passed)
    start_streaming(module)
    return fused
