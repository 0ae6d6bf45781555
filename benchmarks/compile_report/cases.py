"""Shipped kernels and their configurations, which `compile_report` compiles. Independent of the compiler."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Final, NamedTuple

from benchmarks.compile_report.offline_compile import Launch, varying_arguments
from kvscope_engine.bench.kernels.tile_search import candidates
from kvscope_kernels.attention_scores.block_bounds import _block_bounds_kernel, bounds_constants
from kvscope_kernels.attention_scores.block_scores import NEAR, _block_scores_kernel, score_constants
from kvscope_kernels.copy_rows import _TILE_WORDS, _copy_rows_kernel
from kvscope_kernels.decode.bounds import MAX_PART_TOKENS
from kvscope_kernels.decode.plan_kernel import TILE_B, _plan_decode_kernel
from kvscope_kernels.fused_moe.alignment import _align_experts_kernel, align_constants
from kvscope_kernels.fused_moe.expert_weights import Gate
from kvscope_kernels.fused_moe.mixture import (
    _SUM_TILE,
    MAX_ROWS_PER_TILE,
    _expert_product_kernel,
    _sum_experts_kernel,
    expert_constants,
    expert_tiles,
)
from kvscope_kernels.gated_activation import GELU_TANH, SILU, _gated_activation_kernel, gate_constants
from kvscope_kernels.kv_formats import E4M3, E4M3_BITS, INT8, UNQUANTIZED, fp8_format
from kvscope_kernels.kv_write import _kv_write_kernel, write_constants
from kvscope_kernels.launch import (
    DotTiles,
    attention_constants,
    decode_tiles,
    fixed_prefill_tiles,
    latent_tiles,
    prefill_tiles,
)
from kvscope_kernels.linear.skinny_linear import _skinny_linear_kernel, linear_constants, linear_tiles
from kvscope_kernels.logits.allow_tokens import _TILE as _TOKENS_TILE
from kvscope_kernels.logits.allow_tokens import _allow_tokens_kernel
from kvscope_kernels.logits.draw_tokens import _WARPS as _DRAW_WARPS
from kvscope_kernels.logits.draw_tokens import _draw_tokens_kernel, draw_constants
from kvscope_kernels.merge_splits import BlockSumSpec, _merge_splits_kernel, merge_constants, shares_constants
from kvscope_kernels.paged_decode_attention import _paged_decode_attention_kernel
from kvscope_kernels.paged_latent_attention import _paged_latent_attention_kernel, latent_constants
from kvscope_kernels.paged_prefill_attention import _paged_prefill_attention_kernel
from kvscope_kernels.quantized_linear.fp8 import _round_rows_kernel
from kvscope_kernels.quantized_linear.triton_product import (
    _grouped_product_kernel,
    num_splits,
    product_constants,
    product_tiles,
)
from kvscope_kernels.rms_norm import _rms_norm_kernel, norm_constants
from kvscope_kernels.rotate_write import _rotate_write_kernel, rotate_constants
from kvscope_kernels.triton_language import Kernel
from kvscope_kernels.tuning.tile_table import PREFILL

_BLOCK_SIZE: Final = 16
_LARGE_TILES_SPILL_BYTES: Final = 256
"""Accepted bytes of spill stores and loads for prefill's largest tiles, which were measured to be the fastest
nevertheless.
"""
_HEAT_SPILL_BYTES: Final = 64
"""Accepted bytes of spills for decodes over 8-bit latents that measure page heat. Measuring needs about 500
sums per row.
"""
_LONG_QUERY_LEN: Final = 8192
_SHORT_QUERY_LENS: Final = (3, 128)
"""Number of queries of a speculative draft, and of a short message in a conversation."""
_MANY_RUNS: Final = 64
_TYPES: Final = {
    **dict.fromkeys(("block_tables", "seq_lens", "query_start", "parts", "ranges", "sum_offsets"), "*i32"),
    **dict.fromkeys(("slot_mapping", "pairs", "addresses", "row_words", "rows"), "*i64"),
    "allowed": "*i32",
    **dict.fromkeys(("keys", "tokens"), "*i64"),
    "row_options": "*fp64",
    "logits": "*fp32",
    **dict.fromkeys(("partial", "partial_lse", "k_scale", "v_scale"), "*fp32"),
    **dict.fromkeys(("piece_sums", "part_lse", "shares", "sums"), "*fp32"),
    **dict.fromkeys(("x", "total", "weight", "norm_weight", "eps"), "*fp32"),
    **dict.fromkeys(("scale", "softcap"), "fp32"),
}
_GROUPED_TYPES: Final = {
    **dict.fromkeys(("words", "num_finished", "num_rows"), "*i32"),
    "scale": "*fp16",
    "low": "*fp16",
    "bias": "*fp32",
    "sums": "*fp32",
    "row_scale": "*fp32",
    "num_rows": "i32",
}
_EXPERT_TYPES: Final = {"ids": "*i64", "experts": "*i32", "pairs": "*i32"}
_DATA: Final = frozenset({"query", "key", "value", "k_cache", "v_cache", "out", "sinks", "cache", "bounds"}) | {
    *("heads", "cos", "signed_sin", "delta", "both")
}
_CACHES: Final = frozenset({"k_cache", "v_cache"})
_EIGHT_BITS: Final = {INT8: "*i8", E4M3: "*fp8e4nv", E4M3_BITS: "*u8"}
_FORMAT_NAMES: Final = {UNQUANTIZED: "", INT8: " int8", E4M3: " fp8", E4M3_BITS: " fp8 bits"}
_SCALES: Final = ("k_scale", "v_scale", "scale_stride_b", "scale_stride_s", "scale_stride_h")
_SUMS: Final = ("sum_offsets", "piece_sums", "part_lse")
_UNALIGNED: Final = frozenset({"scale", "softcap", "window"})


class Heads(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int = 0
    """Dimension of values; 0 if it equals `head_dim`."""

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    def __str__(self) -> str:
        values = f"+{self.value_dim}" if self.value_dim else ""
        return f"{self.num_heads}/{self.num_kv_heads}/{self.head_dim}{values}"


class Experts(NamedTuple):
    num_experts: int
    top_k: int
    hidden: int
    size: int
    gate: Gate = Gate()
    has_bias: bool = False
    is_packed: bool = False
    """Whether weights have 4 bits."""

    def __str__(self) -> str:
        return f"{self.top_k} of {self.num_experts} {self.hidden}/{self.size}{' 4 bits' * self.is_packed}"


class AttentionOptions(NamedTuple):
    window: bool = False
    softcap: bool = False
    sinks: bool = False
    chunks: bool = False

    def __str__(self) -> str:
        return "+".join(name for name, on in self._asdict().items() if on) or "plain"


SMOLLM2_135M: Final = Heads(9, 3, 64)
LLAMA_8B: Final = Heads(32, 8, 128)
GEMMA2_2B: Final = Heads(8, 4, 256)
GEMMA4_FULL: Final = Heads(16, 2, 512)
GPT_OSS_20B: Final = Heads(64, 8, 64)
DEEPSEEK_V3: Final = Heads(128, 1, 576, 512)
DEEPSEEK_V2_LITE: Final = Heads(16, 1, 576, 512)
EXPANDED: Final = Heads(16, 16, 192, 128)
"""Heads of DeepSeek-V2-Lite in a prefill that expands latents to keys and values."""
QWEN3_30B_A3B: Final = Experts(128, 8, 2048, 768)
GPT_OSS_EXPERTS: Final = Experts(32, 4, 2880, 2880, Gate(alpha=1.702, limit=7.0, shift=1.0), has_bias=True)
PLAIN: Final = AttentionOptions()
EVERY_OPTION: Final = (
    PLAIN,
    AttentionOptions(window=True),
    AttentionOptions(softcap=True),
    AttentionOptions(sinks=True),
    AttentionOptions(chunks=True),
    AttentionOptions(window=True, softcap=True, sinks=True),
)


def decode_case(
    heads: Heads,
    options: AttentionOptions,
    dtype: str = "bf16",
    kv_format: int = UNQUANTIZED,
    *,
    is_measured: bool = False,
) -> Launch:
    """Return the launch of decode attention. With `is_measured`, it also measures page heat.

    A window is not a separate variant, because the kernel gets its size as an argument.
    """
    is_quantized = kv_format != UNQUANTIZED
    tiles = decode_tiles(heads.head_dim, heads.head_dim, heads.group, _element_bytes(dtype), is_quantized=is_quantized)
    constants = {"NUM_KV_HEADS": heads.num_kv_heads, **_attention_constants(heads, tiles, options, kv_format)}
    constants |= _piece_constants(tiles.tile_n, is_measured=is_measured)
    variant = f"{heads} {dtype}{_FORMAT_NAMES[kv_format]} {options}{' heat' * is_measured}"
    return _launch("paged_decode", variant, _paged_decode_attention_kernel, constants, dtype, tiles)


def bounds_case(heads: Heads, dtype: str = "bf16", kv_format: int = UNQUANTIZED) -> Launch:
    constants: dict[str, object] = {
        "NUM_KV_HEADS": heads.num_kv_heads,
        **bounds_constants(heads.head_dim, _BLOCK_SIZE),
        **_format_constants(kv_format),
    }
    constants.pop("v_scale", None)
    variant = f"{heads} {dtype}{_FORMAT_NAMES[kv_format]}"
    return _launch("block_bounds", variant, _block_bounds_kernel, constants, dtype)


def choice_cases(heads: Heads, dtype: str = "bf16") -> Iterator[Launch]:
    yield bounds_case(heads, dtype)
    variant, kv_heads = f"{heads} {dtype}", {"NUM_KV_HEADS": heads.num_kv_heads}
    shapes = score_constants(heads.group, heads.head_dim, _element_bytes(dtype))
    scores = {**kv_heads, **shapes, "NEAR": NEAR, "UPCAST_DOT": False}
    yield _launch("block_scores", variant, _block_scores_kernel, scores, dtype)


def prefill_case(
    heads: Heads,
    options: AttentionOptions,
    capability: int,
    dtype: str = "bf16",
    kv_format: int = UNQUANTIZED,
    *,
    max_query_len: int = 512,
    is_cut: bool = False,
    is_fixed: bool = False,
    tiles: DotTiles | None = None,
) -> Launch:
    """Return the launch of prefill attention for sequences of up to `max_query_len` queries.

    `is_cut`: few queries after long contexts, split into parts. `is_fixed`: tiles of one size for all lengths. `tiles`:
    overrides the tiles of a launch.
    """
    dims = heads.head_dim, heads.value_dim or heads.head_dim, heads.group, _element_bytes(dtype)
    if is_fixed:
        tiles = fixed_prefill_tiles(*dims, capability, is_quantized=kv_format != UNQUANTIZED)
    tiles = tiles or prefill_tiles(
        *dims,
        max_query_len,
        capability,
        num_runs=heads.num_kv_heads * (_MANY_RUNS if max_query_len >= _LONG_QUERY_LEN else 1),
        is_quantized=kv_format != UNQUANTIZED,
    )
    constants = {
        "IS_SLIDING": int(options.window),
        "IS_CHUNKED": options.chunks,
        "SAME_STRIDES": not heads.value_dim,
        "IS_CUT": is_cut,
        "IS_FIXED": is_fixed,
        "QUERY_IN_REGISTERS": tiles.query_in_registers,
        **({} if is_cut else dict.fromkeys(("parts", "partial", "partial_lse"))),
        **_attention_constants(heads, tiles, options, kv_format),
    }
    queries = "fixed" if is_fixed else f"queries<={max_query_len}"
    variant = f"{heads} {dtype}{_FORMAT_NAMES[kv_format]} {options} {queries}{' cut' * is_cut}"
    launch = _launch("paged_prefill", variant, _paged_prefill_attention_kernel, constants, dtype, tiles)
    return replace(launch, accepted_spill_bytes=_LARGE_TILES_SPILL_BYTES if tiles.tile_m > 128 else 0)


def cut_cases(
    heads: Heads, capability: int, dtype: str = "bf16", kv_format: int = UNQUANTIZED, options: AttentionOptions = PLAIN
) -> Iterator[Launch]:
    for max_query_len in _SHORT_QUERY_LENS:
        yield prefill_case(heads, options, capability, dtype, kv_format, max_query_len=max_query_len, is_cut=True)


def memory_cases(heads: Heads, capability: int, dtype: str = "bf16") -> Iterator[Launch]:
    """Yield the launches of kernels that do little arithmetic."""
    yield from merge_cases(heads, heads.head_dim, dtype)
    yield merge_case(heads, heads.head_dim, dtype, is_run=True)
    for is_chunked in (False, True):
        for block_size in (0, _BLOCK_SIZE):
            plan: dict[str, object] = {"LONGEST": MAX_PART_TOKENS, "TILE_B": TILE_B, "IS_CHUNKED": is_chunked}
            plan |= {"BLOCK_SIZE": block_size, **({} if block_size else {"sum_offsets": None})}
            variant_of_plan = f"every batch{' of chunks' * is_chunked}{' heat' * (block_size > 0)}"
            yield _launch("plan_decode", variant_of_plan, _plan_decode_kernel, plan, dtype)
    yield write_case(heads, dtype)
    yield _launch("copy_rows", "every shape", _copy_rows_kernel, {"TILE": _TILE_WORDS}, dtype)
    yield _launch("allow_tokens", "every vocabulary", _allow_tokens_kernel, {"TILE": _TOKENS_TILE}, dtype)
    yield draw_case()
    yield from layer_cases(heads, capability, dtype)


def merge_cases(heads: Heads, value_dim: int, dtype: str) -> Iterator[Launch]:
    for is_measured in (False, True):
        yield merge_case(heads, value_dim, dtype, is_measured=is_measured)


def merge_case(heads: Heads, value_dim: int, dtype: str, *, is_run: bool = False, is_measured: bool = False) -> Launch:
    constants: dict[str, object] = {
        **merge_constants(heads.num_heads, value_dim),
        **shares_constants(
            heads.num_heads, BlockSumSpec(_BLOCK_SIZE, 1, _BLOCK_SIZE) if is_measured else BlockSumSpec()
        ),
        **({} if is_run else {"query_start": None}),
        **({} if is_measured else dict.fromkeys(("parts", "shares", *_SUMS))),
    }
    variant = f"{heads} {dtype}{' runs' * is_run}{' heat' * is_measured}"
    return _launch("merge_splits", variant, _merge_splits_kernel, constants, dtype)


def draw_case() -> Launch:
    """Return the launch of the kernel that draws tokens, for a vocabulary whose size is a multiple of 16."""
    shapes = draw_constants()
    return _launch("draw_tokens", "every vocabulary", _draw_tokens_kernel, shapes, "fp32", num_warps=_DRAW_WARPS)


def write_case(heads: Heads, dtype: str = "bf16", kv_format: int = UNQUANTIZED) -> Launch:
    shapes = write_constants(heads.num_kv_heads, heads.head_dim, heads.head_dim, _BLOCK_SIZE)
    constants = {**shapes, **_format_constants(kv_format)}
    return _launch("kv_write", f"{heads} {dtype}{_FORMAT_NAMES[kv_format]}", _kv_write_kernel, constants, dtype)


def layer_cases(heads: Heads, capability: int, dtype: str = "bf16") -> Iterator[Launch]:
    hidden = heads.num_heads * heads.head_dim
    for name, absent in (("rms_norm", {"delta": None, "total": None}), ("add_rms_norm", {})):
        shapes = norm_constants(hidden)
        warps = shapes.pop("num_warps")
        yield _launch(name, f"{hidden} {dtype}", _rms_norm_kernel, {**shapes, **absent}, dtype, num_warps=warps)
    for kind, name in ((SILU, "silu"), (GELU_TANH, "gelu")):
        constants = gate_constants(4 * hidden, kind)
        yield _launch("gate", f"{4 * hidden} {name} {dtype}", _gated_activation_kernel, constants, dtype)
    for kv_format in (UNQUANTIZED, INT8):
        yield rotate_case(heads, dtype, kv_format)
    yield rotate_case(heads, dtype, has_norm=True)
    for num_rows, bits in product((1, 16, 64, 512), (4, 8)):
        yield grouped_case(heads, num_rows, dtype, bits)
    if dtype != "fp32":
        for num_rows, times in ((1, 1), (16, 1), (16, 7)):
            yield linear_case(heads, num_rows, capability, dtype, times=times)


def rotate_case(heads: Heads, dtype: str = "bf16", kv_format: int = UNQUANTIZED, *, has_norm: bool = False) -> Launch:
    constants = {
        **rotate_constants(heads.num_heads, heads.num_kv_heads, heads.head_dim, _BLOCK_SIZE),
        **_format_constants(kv_format),
        **({} if has_norm else {"norm_weight": None, "eps": None}),
    }
    variant = f"{heads} {dtype}{_FORMAT_NAMES[kv_format]}{' norm' * has_norm}"
    return _launch("rotate_write", variant, _rotate_write_kernel, constants, dtype)


def grouped_case(heads: Heads, num_rows: int, dtype: str = "bf16", bits: int = 4, *, is_fp8: bool = False) -> Launch:
    """Return the launch of a linear layer with weights of 4 or 8 bits, without a bias and with a residual."""
    hidden = heads.num_heads * heads.head_dim
    tiles = product_tiles(num_rows, bits, _element_bytes(dtype))
    splits = num_splits(num_rows, hidden, hidden, bits, tiles, 132)
    group = hidden if is_fp8 else 8 * bits
    constants = {**product_constants(hidden, hidden, group, bits, tiles, splits), "bias": None, "PLAIN": False}
    absent = ("low",) if is_fp8 else ("row_scale",)
    constants |= dict.fromkeys(absent if splits > 1 else (*absent, "sums"))
    variant = f"{hidden} {'fp8' if is_fp8 else f'{bits} bits'} rows<={tiles.tile_m} {dtype}"
    dots = DotTiles(tiles.tile_m, tiles.tile_n, 0, 0, tiles.num_warps, tiles.num_stages, tiles.max_registers)
    launch = _launch("grouped_product", variant, _grouped_product_kernel, constants, dtype, dots)
    types = _GROUPED_TYPES | dict.fromkeys(("x", "add", "out"), f"*{dtype}")
    if is_fp8:
        types["scale"] = "*fp32"
    return replace(launch, arguments={name: types[name] for name in launch.arguments})


def fp8_cases(heads: Heads, capability: int, dtype: str = "bf16") -> Iterator[Launch]:
    for num_rows in (1, 16, 64, 512):
        yield grouped_case(heads, num_rows, dtype, 8, is_fp8=True)
    yield round_case(heads, capability, dtype)


def round_case(heads: Heads, capability: int, dtype: str = "bf16") -> Launch:
    """Return the launch that rounds rows to FP8. Codes have an FP8 dtype if the GPU can convert to it, else the
    dtype of the rows.
    """
    hidden = heads.num_heads * heads.head_dim
    codes_type = "fp8e4nv" if capability >= 89 else dtype
    constants = {"INPUTS": hidden, "TILE": min(4096, hidden)}
    launch = _launch("round_rows", f"{hidden} {dtype}", _round_rows_kernel, constants, dtype, num_warps=8)
    return replace(launch, arguments={"x": f"*{dtype}", "codes": f"*{codes_type}", "scale": "*fp32"})


def linear_case(heads: Heads, num_rows: int, capability: int, dtype: str = "bf16", *, times: int = 1) -> Launch:
    """Return the launch of an unquantized linear layer in a decode, without a bias. It has `times` as many
    outputs as inputs.
    """
    hidden = heads.num_heads * heads.head_dim
    tiles = linear_tiles(num_rows, times * hidden, hidden, 132, capability)
    constants = {**linear_constants(times * hidden, hidden, tiles), "bias": None, "UPCAST_DOT": False}
    dots = DotTiles(tiles.tile_m, tiles.tile_n, 0, 0, 4, tiles.num_stages)
    variant = f"{hidden} to {times * hidden} rows<={tiles.tile_m} {dtype}"
    launch = _launch("skinny_linear", variant, _skinny_linear_kernel, constants, dtype, dots)
    return replace(launch, arguments={**launch.arguments, "x": f"*{dtype}", "weight": f"*{dtype}"})


def expert_cases(model: Experts, dtype: str = "bf16") -> Iterator[Launch]:
    """Yield the launches of a mixture of experts, for every tile size. The first is the one for a single token."""
    hidden, size = model.hidden, model.size
    for tile_m in (1, 16, 32, 64, MAX_ROWS_PER_TILE) if dtype != "fp32" else (1, 16):
        if model.is_packed and tile_m == MAX_ROWS_PER_TILE:
            continue
        yield _expert_case(model, tile_m, size, hidden, model.gate, dtype)
        yield _expert_case(model, tile_m, hidden, size, None, dtype)
    for tile_m in (16, MAX_ROWS_PER_TILE):
        constants = align_constants(model.num_experts, tile_m)
        launch = _launch("align_experts", f"{model} rows<={tile_m}", _align_experts_kernel, constants, dtype)
        yield _with_expert_types(launch, dtype)
    launch = _launch(
        "sum_experts", f"{model} {dtype}", _sum_experts_kernel, {"TOP_K": model.top_k, "TILE": _SUM_TILE}, dtype
    )
    yield _with_expert_types(launch, dtype)


def _expert_case(model: Experts, tile_m: int, outputs: int, inputs: int, gate: Gate | None, dtype: str) -> Launch:
    is_aligned, tiles = tile_m > 1, expert_tiles(tile_m, _element_bytes(dtype), gate, is_packed=model.is_packed)
    constants = {
        **expert_constants(outputs, inputs, model.top_k if gate is not None else 1, tiles, gate),
        **({} if is_aligned else {"pairs": None}),
        **({} if model.has_bias else {"bias": None}),
        **({} if model.is_packed else {"powers": None}),
        **({} if gate is None else {"shares": None}),
        "UPCAST_DOT": False,
    }
    variant = f"{model} {'down' if gate is None else 'up'} rows<={tile_m} {dtype}"
    dots = DotTiles(tiles.tile_m, tiles.tile_n, 0, 0, tiles.num_warps, tiles.num_stages)
    launch = _launch("expert_product", variant, _expert_product_kernel, constants, dtype, dots)
    launch = _with_expert_types(launch, dtype)
    single_token_types = {} if is_aligned else {"experts": "*i64"}
    packed = {"weight": "*u8", "powers": "*u8"} if model.is_packed else {}
    return replace(launch, arguments={**launch.arguments, **single_token_types, **packed})


def _with_expert_types(launch: Launch, dtype: str) -> Launch:
    plain: Mapping[str, str] = {
        **dict.fromkeys(("x", "weight", "bias", "shares", "parts", "out"), f"*{dtype}"),
        **_EXPERT_TYPES,
    }
    known_types = {name: plain[name] for name in launch.arguments if name in plain}
    return replace(launch, arguments={**launch.arguments, **known_types})


def latent_case(
    heads: Heads,
    capability: int,
    max_queries: int,
    dtype: str,
    kv_format: int = UNQUANTIZED,
    *,
    is_measured: bool = False,
) -> Launch:
    rows, is_quantized = max_queries * heads.num_heads, kv_format != UNQUANTIZED
    tiles = latent_tiles(rows, _element_bytes(dtype), capability, is_quantized=is_quantized)
    constants: dict[str, object] = {
        **latent_constants(heads.num_heads, heads.value_dim, heads.head_dim, _BLOCK_SIZE, tiles),
        **_format_constants(kv_format),
        "UPCAST_DOT": False,
        **_piece_constants(tiles.tile_n, is_measured=is_measured),
        **({"query_start": None} if max_queries == 1 else {}),
    }
    constants.pop("scale_stride_h", None)
    kind = " runs" * (max_queries > 1) + " heat" * is_measured
    variant = f"{heads} {dtype}{_FORMAT_NAMES[kv_format]} rows<={tiles.tile_m}{kind}"
    dots = DotTiles(tiles.tile_m, tiles.tile_n, 0, 0, tiles.num_warps, tiles.num_stages)
    launch = _launch("paged_latent", variant, _paged_latent_attention_kernel, constants, dtype, dots)
    return replace(launch, accepted_spill_bytes=_HEAT_SPILL_BYTES if is_measured and is_quantized else 0)


def latent_cases(heads: Heads, capability: int, dtype: str = "bf16") -> Iterator[Launch]:
    for kv_format in (UNQUANTIZED, INT8, fp8_format(capability)) if dtype != "fp32" else (UNQUANTIZED,):
        for max_queries in (1, _SHORT_QUERY_LENS[0]):
            yield latent_case(heads, capability, max_queries, dtype, kv_format)
        yield latent_case(heads, capability, 1, dtype, kv_format, is_measured=True)
    yield from merge_cases(heads, heads.value_dim, dtype)
    write = {
        **write_constants(1, heads.value_dim, heads.head_dim - heads.value_dim, _BLOCK_SIZE),
        **_format_constants(UNQUANTIZED),
    }
    yield _launch("kv_write", f"{heads} {dtype}", _kv_write_kernel, write, dtype)


def quantized_cases(
    heads: Heads, capability: int, dtype: str = "bf16", options: AttentionOptions = PLAIN
) -> Iterator[Launch]:
    for kv_format in (INT8, fp8_format(capability)):
        for is_measured in (False, True):
            yield decode_case(heads, options, dtype, kv_format, is_measured=is_measured)
        yield prefill_case(heads, options, capability, dtype, kv_format)
        yield prefill_case(heads, options, capability, dtype, kv_format, max_query_len=1)
        yield from cut_cases(heads, capability, dtype, kv_format, options)
        yield write_case(heads, dtype, kv_format)
        yield bounds_case(heads, dtype, kv_format)
        yield rotate_case(heads, dtype, kv_format, has_norm=True)


def shipped_cases(capability: int) -> Iterator[Launch]:
    """Yield every configuration that must compile without an unaccepted spill, once."""
    seen: set[tuple[str, str]] = set()
    for launch in _all_cases(capability):
        if (launch.name, launch.variant) not in seen:
            seen.add((launch.name, launch.variant))
            yield launch


def _all_cases(capability: int) -> Iterator[Launch]:
    for heads in (SMOLLM2_135M, LLAMA_8B, GEMMA2_2B, GPT_OSS_20B):
        for options in EVERY_OPTION:
            if options == PLAIN or not (options.window or options.chunks) or options.softcap:
                for is_measured in (False, True):
                    yield decode_case(heads, options, is_measured=is_measured)
            yield prefill_case(heads, options, capability)
            yield prefill_case(heads, options, capability, is_fixed=True)
            yield from cut_cases(heads, capability, options=options)
        for max_query_len in (1, _LONG_QUERY_LEN):
            yield prefill_case(heads, PLAIN, capability, max_query_len=max_query_len)
        yield from choice_cases(heads)
        yield from memory_cases(heads, capability)
        yield from fp8_cases(heads, capability)
        yield from quantized_cases(heads, capability)
        yield from quantized_cases(heads, capability, options=EVERY_OPTION[-1])
    for heads in (DEEPSEEK_V3, DEEPSEEK_V2_LITE):
        yield from latent_cases(heads, capability)
    yield from latent_cases(DEEPSEEK_V2_LITE, capability, "fp32")
    for model in (QWEN3_30B_A3B, GPT_OSS_EXPERTS, GPT_OSS_EXPERTS._replace(is_packed=True)):
        yield from expert_cases(model)
    yield from expert_cases(QWEN3_30B_A3B, "fp32")
    for max_query_len in (512, _LONG_QUERY_LEN):
        yield prefill_case(EXPANDED, PLAIN, capability, max_query_len=max_query_len)
    yield from quantized_cases(SMOLLM2_135M, capability, "fp32")
    yield from quantized_cases(SMOLLM2_135M, capability, "fp16")
    yield from choice_cases(SMOLLM2_135M, "fp32")
    for is_measured in (False, True):
        yield decode_case(SMOLLM2_135M, PLAIN, "fp32", is_measured=is_measured)
        for dtype in ("bf16", "fp32"):
            yield decode_case(GEMMA4_FULL, PLAIN, dtype, is_measured=is_measured)
    for is_fixed in (False, True):
        yield prefill_case(SMOLLM2_135M, PLAIN, capability, "fp32", is_fixed=is_fixed)
    yield prefill_case(SMOLLM2_135M, PLAIN, capability, "fp16", is_fixed=True)


def few_cases(capability: int) -> Iterator[Launch]:
    """Yield the configurations that come closest to a program's resource limits. Every run of the tests
    compiles them.
    """
    yield decode_case(LLAMA_8B, PLAIN)
    yield prefill_case(LLAMA_8B, PLAIN, capability, kv_format=INT8, max_query_len=_SHORT_QUERY_LENS[-1], is_cut=True)
    yield prefill_case(
        GPT_OSS_20B, AttentionOptions(sinks=True), capability, max_query_len=_SHORT_QUERY_LENS[0], is_cut=True
    )
    yield latent_case(DEEPSEEK_V3, capability, 1, "bf16")
    yield linear_case(LLAMA_8B, 16, capability)


def candidate_cases(capability: int) -> Iterator[Launch]:
    """Yield the tiles that `bench kernels --tune` tries for 64 queries after a long context. Only tiles that
    fit are worth measuring.
    """
    heads, max_query_len = LLAMA_8B, 64
    dims = heads.head_dim, heads.head_dim, heads.group, 2
    default_tiles = prefill_tiles(*dims, max_query_len, capability, num_runs=heads.num_kv_heads)
    for tiles in candidates(PREFILL, default_tiles, heads.group, capability):
        launch = prefill_case(heads, PLAIN, capability, max_query_len=max_query_len, is_cut=True, tiles=tiles)
        yield replace(launch, variant=f"{heads} cut{' query in registers' * tiles.query_in_registers}")


def core_cases(capability: int) -> Iterator[Launch]:
    """Yield configurations that together contain every branch of every kernel. Long test runs compile them."""
    for heads, options in ((LLAMA_8B, PLAIN), (SMOLLM2_135M, EVERY_OPTION[-1])):
        for is_measured in (False, True):
            yield decode_case(heads, options, is_measured=is_measured)
        yield prefill_case(heads, options, capability)
        yield from cut_cases(heads, capability, options=options)
    yield from latent_cases(DEEPSEEK_V3, capability)
    for model in (QWEN3_30B_A3B, GPT_OSS_EXPERTS, GPT_OSS_EXPERTS._replace(is_packed=True)):
        yield from expert_cases(model)
    yield from choice_cases(LLAMA_8B)
    yield from memory_cases(LLAMA_8B, capability)
    yield from fp8_cases(LLAMA_8B, capability)
    yield prefill_case(LLAMA_8B, PLAIN, capability, max_query_len=_LONG_QUERY_LEN)
    yield prefill_case(LLAMA_8B, AttentionOptions(chunks=True), capability)
    for heads, options in ((LLAMA_8B, PLAIN), (SMOLLM2_135M, EVERY_OPTION[-1])):
        yield prefill_case(heads, options, capability, is_fixed=True)
    yield prefill_case(SMOLLM2_135M, PLAIN, capability, kv_format=INT8)
    yield from cut_cases(SMOLLM2_135M, capability, kv_format=INT8)
    for is_measured in (False, True):
        yield decode_case(SMOLLM2_135M, PLAIN, kv_format=fp8_format(capability), is_measured=is_measured)
    for kv_format in (INT8, fp8_format(capability)):
        yield write_case(SMOLLM2_135M, kv_format=kv_format)
        yield bounds_case(SMOLLM2_135M, kv_format=kv_format)


def _piece_constants(tile_n: int, *, is_measured: bool) -> dict[str, object]:
    """Return the kernel constants for measuring page heat, as the launcher passes them. Without measuring, no
    sums are stored.
    """
    return {"PIECE": math.gcd(_BLOCK_SIZE, tile_n)} if is_measured else {"PIECE": 0, **dict.fromkeys(_SUMS)}


def _attention_constants(heads: Heads, tiles: DotTiles, options: AttentionOptions, kv_format: int) -> dict[str, object]:
    constants: dict[str, object] = {
        **attention_constants(heads.group, heads.head_dim, heads.value_dim or heads.head_dim, _BLOCK_SIZE, tiles),
        **_format_constants(kv_format),
        "HAS_SOFTCAP": options.softcap,
        "HAS_SINKS": options.sinks,
        "UPCAST_DOT": False,
    }
    if not options.sinks:
        constants["sinks"] = None  # what the launcher passes
    return constants


def _format_constants(kv_format: int) -> dict[str, object]:
    """Return the kernel constants for the cache's format, as the launcher passes them. An unquantized cache has
    no scales.
    """
    return {"KV_FORMAT": kv_format, **(dict.fromkeys(_SCALES) if kv_format == UNQUANTIZED else {})}


def _launch(
    name: str,
    variant: str,
    kernel: Kernel,
    constants: Mapping[str, object],
    dtype: str,
    tiles: DotTiles | None = None,
    num_warps: int = 4,
) -> Launch:
    names = [name for name in kernel.arg_names if name not in constants]
    arguments = {name: f"*{dtype}" if name in _DATA else _TYPES.get(name, "i32") for name in names}
    kv_format = constants.get("KV_FORMAT", UNQUANTIZED)
    if isinstance(kv_format, int) and kv_format != UNQUANTIZED:
        arguments |= dict.fromkeys(_CACHES, _EIGHT_BITS[kv_format])
    aligned = frozenset(name for name in names if name not in _UNALIGNED) - varying_arguments(kernel)
    warps, stages, registers = tiles[4:7] if tiles else (num_warps, 3, None)
    return Launch(
        name=name,
        variant=variant,
        kernel=kernel,
        arguments=arguments,
        constants=constants,
        aligned=aligned,
        num_warps=warps,
        num_stages=stages,
        max_registers=registers,
    )


def _element_bytes(dtype: str) -> int:
    return {"fp32": 4, "bf16": 2, "fp16": 2}[dtype]
