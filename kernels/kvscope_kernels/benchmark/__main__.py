"""`python -m kvscope_kernels.benchmark`: prints the table. Exits with 1 where there is no CUDA device."""

import sys
from collections.abc import Iterable
from itertools import chain

import torch

from kvscope_kernels.benchmark.rows import (
    Row,
    decode_rows,
    expert_rows,
    layer_rows,
    prefill_rows,
    product_rows,
    quantized_rows,
    skew_rows,
    turn_rows,
    write_rows,
)
from kvscope_kernels.benchmark.timing import time_on_gpu
from kvscope_kernels.dispatch import ops_for


def main() -> int:
    """Measures, prints as it goes, and returns the exit code."""
    if not torch.cuda.is_available():
        print("the kernel benchmark needs a CUDA device; torch finds none", file=sys.stderr)
        return 1
    ops = ops_for("cuda")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; CUDA-graph replays, cold L2, medians")
    print("heads 32/8/128, bf16, blocks of 16, unless named otherwise")
    parts = (decode_rows, quantized_rows, skew_rows, write_rows, layer_rows, expert_rows, prefill_rows, turn_rows)
    products = product_rows("cuda", time_on_gpu)
    print_table(chain(products, chain.from_iterable(part(ops, "cuda", time_on_gpu) for part in parts)))
    return 0


def print_table(rows: Iterable[Row]) -> None:
    """One line a row, as soon as it is measured."""
    print(f"{'':36} {'us':>10} {'rate':>8}")
    for row in rows:
        against = f"   {row.ratio:5.2f} x {row.against}" if row.ratio is not None else ""
        print(f"{row.name:36} {row.time_us:10.1f} {row.rate:8.3f} {row.unit:7}{against}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
