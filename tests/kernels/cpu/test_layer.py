"""A whole layer in one call gives bit-equal results to its single operations, and writes the same caches."""

from typing import Any

import pytest
import torch

from kvscope_kernels.attention_args import AttentionArgs
from kvscope_kernels.cpu.decode import paged_decode_attention_native
from kvscope_kernels.cpu.grouped import NativeGrouped
from kvscope_kernels.cpu.layer import CompiledLayer, DecodeStep, LayerSpec, Norm, Weight, can_compile
from kvscope_kernels.cpu.layers import (
    MAX_ELEMENTS_PER_CALL,
    gated_activation_native,
    rms_norm_native,
    rotate_write_native,
)
from kvscope_kernels.cpu.library import library
from kvscope_kernels.cpu.linear import Int8Weight
from kvscope_kernels.quantized_linear.grouped_weight import rounded
from kvscope_kernels.rotate_write import CosSin, HeadNorm, Rotation

pytestmark = pytest.mark.skipif(library() is None, reason="needs a C compiler")

HIDDEN, SIZE, HEADS, KV_HEADS, DIM, BLOCK = 48, 80, 4, 2, 16, 4
LENGTHS = (1, 9, 30)
POISON = 1 << 30
"""An invalid block: reading it crashes the process."""


def random_tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_norm(seed: int) -> Norm:
    return Norm(1.0 + 0.1 * random_tensor(HIDDEN, seed=seed), 1e-5)


HEAD_NORM = Norm(1.0 + 0.1 * random_tensor(HEADS + KV_HEADS, DIM, seed=15), 1e-5)


def random_product(bits: int, in_groups: bool, *shape: int, seed: int, bias: torch.Tensor | None = None) -> Weight:
    weight = random_tensor(*shape, seed=seed)
    return NativeGrouped(rounded(weight, bits), bias) if in_groups else Int8Weight(weight, bias)


def make_products(*kinds: tuple[int, bool]) -> tuple[Weight, ...]:
    """Return products with these bits; some are grouped."""
    joined = (HEADS + 2 * KV_HEADS) * DIM
    shapes = ((joined, HIDDEN), (HIDDEN, HEADS * DIM), (2 * SIZE, HIDDEN), (HIDDEN, SIZE))
    biases = (random_tensor(joined, seed=9), None, None, None)
    each = enumerate(zip(kinds, shapes, biases, strict=True))
    return tuple(random_product(*kind, *shape, seed=seed, bias=bias) for seed, (kind, shape, bias) in each)


INT8, GROUPS_OF_4, GROUPS_OF_8 = (8, False), (4, True), (8, True)


def make_form(**changes: Any) -> LayerSpec:
    form = LayerSpec(
        products=make_products(*[INT8] * 4),
        norms=(random_norm(4), random_norm(5), random_norm(6)),
        head_norm=None,
        activation=0,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        scale=0.25,
        sliding_window=None,
        softcap=None,
        sinks=None,
        is_chunked=False,
        dtype=torch.bfloat16,
        sum_dtype=torch.float32,
    )
    return form._replace(**changes)


def make_caches(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    packed = random_tensor(32, 2, BLOCK, KV_HEADS, DIM, seed=7).to(dtype)
    return packed[:, 0], packed[:, 1]


def make_step(dtype: torch.dtype) -> DecodeStep:
    blocks = torch.randperm(32, generator=torch.Generator().manual_seed(8)).int()
    tables = torch.full((len(LENGTHS), 11), POISON, dtype=torch.int32)
    slots = []
    for row, length in enumerate(LENGTHS):
        count = -(-length // BLOCK)
        tables[row, :count], blocks = blocks[:count], blocks[count:]
        slots.append(int(tables[row, count - 1]) * BLOCK + (length - 1) % BLOCK)
    slots[0] = -1
    tables[0, 0] = 3
    cos, sin = (random_tensor(len(LENGTHS), 1, DIM, seed=seed).to(dtype) for seed in (10, 11))
    return DecodeStep(CosSin(cos, sin), torch.tensor(slots), tables, torch.tensor(LENGTHS, dtype=torch.int32))


def run_parts(
    form: LayerSpec, x: torch.Tensor, normed: torch.Tensor | None, step: DecodeStep, caches: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    turn, slots, tables, lengths = step.tensors
    qkv, o, gate_up, down = form.products

    def norm(of: Norm, numbers: torch.Tensor) -> torch.Tensor:
        return rms_norm_native(numbers, of.weight, torch.tensor(of.eps), form.dtype)

    before, inside, following = form.norms
    heads = qkv.product(norm(before, x) if normed is None else normed).view(len(x), -1, DIM)
    of_heads = None if form.head_norm is None else HeadNorm(form.head_norm.weight, torch.tensor(form.head_norm.eps))
    query = rotate_write_native(heads, Rotation(HEADS, of_heads, turn), *caches, slots)
    asked = form.scale, form.sliding_window, form.softcap, form.sinks
    attended = paged_decode_attention_native(
        AttentionArgs(query, *caches, tables, lengths, *asked, is_chunked=form.is_chunked)
    )
    x = o.product(attended.flatten(1), x)
    activated = gated_activation_native(gate_up.product(norm(inside, x)), form.activation)
    x = down.product(activated, x)
    return x, None if following is None else norm(following, x)


def check_equals_parts(form: LayerSpec, *, is_normed: bool = False) -> None:
    x, step = random_tensor(len(LENGTHS), HIDDEN, seed=12).to(form.sum_dtype), make_step(form.dtype)
    normed = random_tensor(len(LENGTHS), HIDDEN, seed=13).to(form.dtype) if is_normed else None
    theirs, ours = make_caches(form.dtype), make_caches(form.dtype)
    expected, expected_norm = run_parts(form, x, normed, step, theirs)
    layer = CompiledLayer(form, *ours)
    assert step.has_supported_layout
    assert layer.supports(x, normed, step)
    found, found_norm = layer(x, normed, step)
    assert torch.equal(found, expected)
    assert bool(found.isfinite().all())
    assert (found_norm is None) == (expected_norm is None)
    assert found_norm is None or expected_norm is None or torch.equal(found_norm, expected_norm)
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sum_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_normed", [False, True])
def test_compiled_cpu_layer_equals_its_single_operations_for_all_dtypes(
    dtype: torch.dtype, sum_dtype: torch.dtype, is_normed: bool
) -> None:
    check_equals_parts(make_form(dtype=dtype, sum_dtype=sum_dtype), is_normed=is_normed)


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 5},
        {"sliding_window": 5, "is_chunked": True},
        {"softcap": 2.0},
        {"sinks": random_tensor(HEADS, seed=14)},
        {"activation": 1},
        {"norms": (random_norm(4), random_norm(5), None)},
        {"head_norm": HEAD_NORM},
        {"head_norm": HEAD_NORM, "dtype": torch.float32},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_compiled_cpu_layer_equals_its_single_operations_for_all_attention_options(changes: dict[str, Any]) -> None:
    check_equals_parts(make_form(**changes))


@pytest.mark.parametrize(
    "kinds",
    [
        (GROUPS_OF_4,) * 4,
        (GROUPS_OF_8,) * 4,
        (GROUPS_OF_4, INT8, GROUPS_OF_8, GROUPS_OF_4),
        (INT8, GROUPS_OF_4, GROUPS_OF_4, INT8),
    ],
    ids=["4", "8", "mixed", "ends"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_cpu_layer_equals_its_single_operations_for_all_weight_formats(
    kinds: tuple[tuple[int, bool], ...], dtype: torch.dtype
) -> None:
    check_equals_parts(make_form(products=make_products(*kinds), dtype=dtype))
    check_equals_parts(make_form(products=make_products(*kinds), dtype=dtype, sum_dtype=dtype), is_normed=True)


def test_compiled_cpu_layer_on_two_threads_equals_its_single_operations() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        check_equals_parts(make_form())
    finally:
        torch.set_num_threads(before)


def test_compiled_cpu_layer_does_not_accept_unsupported_inputs_and_configurations() -> None:
    form, caches, step = make_form(), make_caches(torch.bfloat16), make_step(torch.bfloat16)
    layer, x = CompiledLayer(form, *caches), random_tensor(len(LENGTHS), HIDDEN)
    assert not layer.supports(x.bfloat16(), None, step)
    assert not layer.supports(x[:2], None, step)
    assert not layer.supports(x, x, step)
    assert not layer.supports(x, None, make_step(torch.float32))
    assert can_compile(form, *caches)
    assert not can_compile(form, *make_caches(torch.float32))
    assert not can_compile(form._replace(num_heads=HEADS + 1), *caches)
    assert not can_compile(form._replace(head_norm=random_norm(4)), *caches)
    assert not can_compile(form._replace(products=form.products[::-1]), *caches)
    assert not can_compile(form._replace(dtype=torch.float16), *caches)
    with pytest.raises(ValueError, match="can_compile"):
        CompiledLayer(form, *make_caches(torch.float32))


def test_compiled_cpu_layer_accepts_as_many_tokens_as_its_single_operations_handle_in_c() -> None:
    """Larger batches are computed by torch, which rounds different intermediate results."""
    layer = CompiledLayer(make_form(), *make_caches(torch.bfloat16))
    most = MAX_ELEMENTS_PER_CALL // (2 * SIZE)
    for count in (most, most + 1):
        turn = CosSin(*(torch.zeros(count, 1, DIM, dtype=torch.bfloat16) for _ in range(2)))
        rows = torch.zeros(count, dtype=torch.int32)
        step = DecodeStep(turn, rows.long(), rows[:, None], rows)
        assert layer.supports(torch.zeros(count, HIDDEN), None, step) == (count == most)
    assert not DecodeStep(turn, rows, rows[:, None], rows).has_supported_layout
