"""Prepare the process in which Triton's interpreter runs kernels for the tests."""

from __future__ import annotations

import os
from typing import Any

import numpy as np


def start() -> None:
    """Replace the interpreter's matrix products with sums in a fixed order.

    It uses the BLAS of numpy, whose results on some CPUs (AMD, and Intel without AVX-512) depend on the position of a
    row in the tile. On a GPU they do not, and tests of equal bits rely on it.
    """
    assert os.environ["TRITON_INTERPRET"] == "1", "chosen before Triton is imported"
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    with_blas = InterpreterBuilder.create_dot

    def create_dot(builder: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        if a.data.dtype.kind != "f" or b.data.dtype.kind != "f":
            return with_blas(builder, a, b, d, input_precision, max_num_imprecise_acc)
        left, right = (each.data.astype(d.data.dtype) for each in (a, b))
        products = left[..., :, :, np.newaxis] * right[..., np.newaxis, :, :]
        return TensorHandle(products.sum(axis=-2) + d.data, d.dtype.scalar)

    InterpreterBuilder.create_dot = create_dot
