"""Dtypes that the compiled operations support. Operands of other dtypes are processed by the torch references."""

from typing import Final

import torch

DTYPES: Final = (torch.bfloat16, torch.float32)


def dtype_refusal(*dtypes: torch.dtype) -> str:
    """Return why the compiled operations do not support these dtypes, or "" if they do."""
    for dtype in dtypes:
        if dtype not in DTYPES:
            return f"C does not compute in {_name(dtype)}"
    return ""


def cache_refusal(dtype: torch.dtype, cache_dtype: torch.dtype) -> str:
    """Return why the compiled operations do not read or write a KV cache of `cache_dtype`, or "" if they do."""
    if refusal := dtype_refusal(dtype):
        return refusal
    return (
        "" if cache_dtype == dtype else f"C does not convert between {_name(dtype)} and a cache in {_name(cache_dtype)}"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
