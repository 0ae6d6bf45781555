"""Calls the matmuls of the compiled C library from Python, after checking the arguments."""

from ctypes import CDLL, Structure, addressof
from typing import Final

import torch
from torch import Tensor

from kvscope_kernels.checks import require

_X_F32, _OUT_F32, _ADD_F32 = 1, 2, 4
_DTYPES: Final = (torch.bfloat16, torch.float32)


class NativeProduct:
    """Base class of weights, shape (outputs, inputs), whose matmul is a function of the compiled library.

    These functions have the same signature for all memory layouts of weights.
    """

    function: str
    """Name of the function in the compiled library that computes the matmul for this memory layout."""
    outputs: int
    inputs: int

    def _set_weight(self, native: CDLL, parts: Structure, *tensors: Tensor | None) -> None:
        """Set the weight to the struct `parts`, which `function` reads.

        `tensors`: all tensors that the struct points to.
        """
        self._call = getattr(native, self.function)
        self._struct = parts
        self.address = addressof(parts)
        """Address of the struct that `function` reads."""
        self.tensors = tuple(tensor for tensor in tensors if tensor is not None)
        """All tensors of the weight, which must not be freed while the struct points to them."""

    def product(self, x: Tensor, add: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Multiply x (..., inputs) -> (..., outputs). The result has `dtype` if given, otherwise the dtype of `add` if
        given, otherwise that of x. It must be bfloat16 or float32.

        `add`, (..., outputs), is added before the result is rounded to its dtype. Raises ValueError for unsupported
        arguments, and MemoryError if there is no memory for a temporary copy of activations.
        """
        out_dtype = dtype or (x.dtype if add is None else add.dtype)
        if x.shape[-1] != self.inputs or x.dtype not in _DTYPES or out_dtype not in _DTYPES:
            require(False, "x", x, f"(..., {self.inputs}) bfloat16 or float32")
        x = x.contiguous()
        out = torch.empty((*x.shape[:-1], self.outputs), dtype=out_dtype)
        flags = _X_F32 * (x.dtype == torch.float32) + _OUT_F32 * (out_dtype == torch.float32)
        pointer = None
        if add is not None:
            if add.shape != out.shape or add.dtype not in _DTYPES:
                require(False, "add", add, f"{tuple(out.shape)} bfloat16 or float32")
            add = add.contiguous()
            flags += _ADD_F32 * (add.dtype == torch.float32)
            pointer = add.data_ptr()
        count = x.numel() // self.inputs
        if self._call(self.address, x.data_ptr(), count, out.data_ptr(), pointer, flags, torch.get_num_threads()):
            raise MemoryError("no memory for a product's activations")
        return out
