"""Measure each operation of the engine next to its torch reference and other installed libraries.

On a GPU, the Triton kernels are measured; on a CPU, those compiled from C. Attention is compared with SDPA on
contiguous keys and values, flex_attention, FlashInfer and flash-attn. If one of them is missing, the reason is printed.
The table has time, bytes, GB/s, and GB/s as a share of a plain memory read in the same rounds.
"""

from kvscope_engine.bench.kernels.command import add_arguments, run

__all__ = ["add_arguments", "run"]
