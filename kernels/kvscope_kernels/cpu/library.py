"""Python interface of the compiled operations: the only handle of the library, and the signatures of its functions."""

import ctypes
from ctypes import c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

from kvscope_kernels.cpu.compiler import built_library, compiler_refusal


class LinearStruct(ctypes.Structure):
    """Struct `linear` in linear.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("weight", "scale", "bias")),
        *((name, c_int64) for name in ("outputs", "inputs", "groups")),
    )


class GroupedStruct(ctypes.Structure):
    """Struct `grouped` in grouped.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("codes", "facts", "bias")),
        *((name, c_int64) for name in ("outputs", "inputs", "chunks", "span")),
        *((name, c_int32) for name in ("bits", "is_half")),
    )


class DecodeStruct(ctypes.Structure):
    """Struct `attention` in decode.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("query", "k_cache", "v_cache", "tables", "seq_lens", "sinks", "out")),
        *((name, c_int64) for name in ("query_stride_t", "query_stride_h")),
        *((name, c_int64) for name in ("k_stride_b", "k_stride_s", "k_stride_h")),
        *((name, c_int64) for name in ("v_stride_b", "v_stride_s", "v_stride_h")),
        *((name, c_int64) for name in ("table_stride", "out_stride_t", "out_stride_h")),
        *((name, c_int64) for name in ("batch", "heads", "kv_heads", "head_dim", "value_dim", "block_size", "window")),
        *((name, c_float) for name in ("scale", "softcap")),
        *((name, c_int32) for name in ("is_f32", "is_chunked", "threads")),
        ("shares", c_void_p),
        ("shares_stride", c_int64),
    )


class PrefillStruct(ctypes.Structure):
    """Struct `prefill` in prefill.c."""

    _fields_ = (
        *(
            (name, c_void_p)
            for name in ("query", "k_cache", "v_cache", "tables", "query_start", "seq_lens", "sinks", "out")
        ),
        *((name, c_int64) for name in ("query_stride_t", "query_stride_h")),
        *((name, c_int64) for name in ("k_stride_b", "k_stride_s", "k_stride_h")),
        *((name, c_int64) for name in ("v_stride_b", "v_stride_s", "v_stride_h")),
        *((name, c_int64) for name in ("table_stride", "out_stride_t", "out_stride_h")),
        *((name, c_int64) for name in ("batch", "heads", "kv_heads", "head_dim", "value_dim", "block_size", "window")),
        *((name, c_float) for name in ("scale", "softcap")),
        *((name, c_int32) for name in ("is_f32", "is_chunked", "threads")),
    )


class RotationStruct(ctypes.Structure):
    """Struct `rotation` in rotation.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("heads", "norm", "cos", "sin", "k_cache", "v_cache", "slots", "query")),
        *((name, c_int64) for name in ("tokens", "num_heads", "kv_heads", "dim", "turn_stride", "block_size")),
        *((name, c_int64) for name in ("k_stride_b", "k_stride_s", "k_stride_h")),
        *((name, c_int64) for name in ("v_stride_b", "v_stride_s", "v_stride_h")),
        ("eps", c_float),
        ("is_f32", c_int32),
    )


class ProductStruct(ctypes.Structure):
    """Struct `product` in layer.c: the address of a weight's struct, and the function that multiplies by this
    weight.
    """

    _fields_ = (("parts", c_void_p), ("call", c_void_p))


class NormStruct(ctypes.Structure):
    """Struct `norm` in layer.c."""

    _fields_ = (("weight", c_void_p), ("eps", c_float), ("unused", c_int32))


class LayerStruct(ctypes.Structure):
    """Struct `layer` in layer.c."""

    _fields_ = (
        *((name, ProductStruct) for name in ("qkv", "o", "gate_up", "down")),
        *((name, NormStruct) for name in ("before_attention", "before_mlp", "of_next", "of_heads")),
        *((name, c_int64) for name in ("hidden", "size", "activation", "is_f32", "sum_is_f32")),
        ("attention", DecodeStruct),
    )


class StepStruct(ctypes.Structure):
    """Struct `step` in layer.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "normed", "out", "out_normed")),
        *((name, c_void_p) for name in ("cos", "sin", "slots", "tables", "seq_lens")),
        *((name, c_int64) for name in ("tokens", "turn_stride", "table_stride", "threads")),
        ("shares", c_void_p),
        ("shares_stride", c_int64),
    )


@cache
def library() -> ctypes.CDLL | None:
    """Return the compiled library, which is loaded once, or None if it cannot be built (`built_library`)."""
    path = built_library()
    return None if path is None else load_library(path)


def library_refusal() -> str:
    """Return why there is no compiled library, or "" if there is one. The first call may compile it (`library`)."""
    if library() is not None:
        return ""
    return compiler_refusal() or "the C operations could not be compiled or loaded"


def load_library(path: Path) -> ctypes.CDLL | None:
    """Load the library in a file and declare its functions. Returns None if the library cannot be loaded."""
    try:
        native = ctypes.CDLL(str(path))
    except OSError:
        return None
    for name, arguments in _ARGUMENTS.items():
        getattr(native, name).argtypes = arguments
        getattr(native, name).restype = c_int
    return native


_ARGUMENTS = {
    "kvscope_linear": (c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int, c_int),
    "kvscope_grouped": (c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int, c_int),
    "kvscope_grouped_float": (c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int, c_int),
    "kvscope_decode": (c_void_p,),
    "kvscope_prefill": (c_void_p,),
    "kvscope_layer": (c_void_p, c_void_p),
    "kvscope_large_pages": (c_void_p, c_int64),
    "kvscope_rms_norm": (c_void_p, c_void_p, c_float, c_void_p, c_int64, c_int64, c_int, c_int),
    "kvscope_gate": (c_void_p, c_void_p, c_int64, c_int64, c_int, c_int),
    "kvscope_rotate_write": (c_void_p,),
    "kvscope_min_tile_rows": (),
}
