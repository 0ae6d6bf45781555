"""`kvscope-engine bench kernels`: each operation of the engine beside its torch reference and what else is installed.

Decode and prefill attention on pages, writing keys and values, what stands between a layer's products, mixtures of
experts, products of few bits, block copies, masks of tokens, draws of tokens and page heat; on a GPU the Triton
kernels, on a CPU those compiled from C. Beside attention: SDPA on contiguous keys and values, flex_attention,
FlashInfer, flash-attn; those that are absent are named with the reason. Time, bytes, GB/s, and the share of the bytes
a second that a plain read takes in the same rounds.
"""

from kvscope_engine.bench.kernels.command import add_arguments, run

__all__ = ["add_arguments", "run"]
