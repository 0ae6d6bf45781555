"""A whole layer in one call gives what its operations give one by one, to the last bit, and writes the same caches."""

from typing import Any

import pytest
import torch

from kvscope_kernels.attention_args import AttentionArgs
from kvscope_kernels.cpu.decode import paged_decode_attention_native
from kvscope_kernels.cpu.grouped import NativeGrouped
from kvscope_kernels.cpu.layer import CompiledLayer, DecodeStep, LayerSpec, Norm, Weight, can_compile
from kvscope_kernels.cpu.layers import (
    FEW_NUMBERS,
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
"""In place of a block: whoever reads there ends the process."""


def some(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def a_norm(seed: int) -> Norm:
    return Norm(1.0 + 0.1 * some(HIDDEN, seed=seed), 1e-5)


HEAD_NORM = Norm(1.0 + 0.1 * some(HEADS + KV_HEADS, DIM, seed=15), 1e-5)


def a_product(bits: int, in_groups: bool, *shape: int, seed: int, bias: torch.Tensor | None = None) -> Weight:
    weight = some(*shape, seed=seed)
    return NativeGrouped(rounded(weight, bits), bias) if in_groups else Int8Weight(weight, bias)


def products_of(*kinds: tuple[int, bool]) -> tuple[Weight, ...]:
    """Bits of each, and whether it is in groups."""
    joined = (HEADS + 2 * KV_HEADS) * DIM
    shapes = ((joined, HIDDEN), (HIDDEN, HEADS * DIM), (2 * SIZE, HIDDEN), (HIDDEN, SIZE))
    biases = (some(joined, seed=9), None, None, None)
    each = enumerate(zip(kinds, shapes, biases, strict=True))
    return tuple(a_product(*kind, *shape, seed=seed, bias=bias) for seed, (kind, shape, bias) in each)


INT8, GROUPS_OF_4, GROUPS_OF_8 = (8, False), (4, True), (8, True)


def a_form(**changes: Any) -> LayerSpec:
    form = LayerSpec(
        products=products_of(*[INT8] * 4),
        norms=(a_norm(4), a_norm(5), a_norm(6)),
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


def caches_of(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    packed = some(32, 2, BLOCK, KV_HEADS, DIM, seed=7).to(dtype)
    return packed[:, 0], packed[:, 1]


def a_step(dtype: torch.dtype) -> DecodeStep:
    blocks = torch.randperm(32, generator=torch.Generator().manual_seed(8)).int()
    tables = torch.full((len(LENGTHS), 11), POISON, dtype=torch.int32)
    slots = []
    for row, length in enumerate(LENGTHS):
        count = -(-length // BLOCK)
        tables[row, :count], blocks = blocks[:count], blocks[count:]
        slots.append(int(tables[row, count - 1]) * BLOCK + (length - 1) % BLOCK)
    slots[0] = -1
    tables[0, 0] = 3
    cos, sin = (some(len(LENGTHS), 1, DIM, seed=seed).to(dtype) for seed in (10, 11))
    return DecodeStep(CosSin(cos, sin), torch.tensor(slots), tables, torch.tensor(LENGTHS, dtype=torch.int32))


def by_parts(
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


def check(form: LayerSpec, *, is_normed: bool = False) -> None:
    x, step = some(len(LENGTHS), HIDDEN, seed=12).to(form.sum_dtype), a_step(form.dtype)
    normed = some(len(LENGTHS), HIDDEN, seed=13).to(form.dtype) if is_normed else None
    theirs, ours = caches_of(form.dtype), caches_of(form.dtype)
    expected, expected_norm = by_parts(form, x, normed, step, theirs)
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
def test_types(dtype: torch.dtype, sum_dtype: torch.dtype, is_normed: bool) -> None:
    check(a_form(dtype=dtype, sum_dtype=sum_dtype), is_normed=is_normed)


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 5},
        {"sliding_window": 5, "is_chunked": True},
        {"softcap": 2.0},
        {"sinks": some(HEADS, seed=14)},
        {"activation": 1},
        {"norms": (a_norm(4), a_norm(5), None)},
        {"head_norm": HEAD_NORM},
        {"head_norm": HEAD_NORM, "dtype": torch.float32},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_a_layer_may_ask_for(changes: dict[str, Any]) -> None:
    check(a_form(**changes))


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
def test_each_product_is_of_its_own_kind(kinds: tuple[tuple[int, bool], ...], dtype: torch.dtype) -> None:
    check(a_form(products=products_of(*kinds), dtype=dtype))
    check(a_form(products=products_of(*kinds), dtype=dtype, sum_dtype=dtype), is_normed=True)


def test_two_threads_change_nothing() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        check(a_form())
    finally:
        torch.set_num_threads(before)


def test_what_is_not_its_own_is_left_to_others() -> None:
    form, caches, step = a_form(), caches_of(torch.bfloat16), a_step(torch.bfloat16)
    layer, x = CompiledLayer(form, *caches), some(len(LENGTHS), HIDDEN)
    assert not layer.supports(x.bfloat16(), None, step)
    assert not layer.supports(x[:2], None, step)
    assert not layer.supports(x, x, step)
    assert not layer.supports(x, None, a_step(torch.float32))
    assert can_compile(form, *caches)
    assert not can_compile(form, *caches_of(torch.float32))
    assert not can_compile(form._replace(num_heads=HEADS + 1), *caches)
    assert not can_compile(form._replace(head_norm=a_norm(4)), *caches)
    assert not can_compile(form._replace(products=form.products[::-1]), *caches)
    assert not can_compile(form._replace(dtype=torch.float16), *caches)
    with pytest.raises(ValueError, match="can_compile"):
        CompiledLayer(form, *caches_of(torch.float32))


def test_as_many_tokens_as_the_operations_compute_themselves() -> None:
    """More of them are torch's, which rounds elsewhere."""
    layer = CompiledLayer(a_form(), *caches_of(torch.bfloat16))
    most = FEW_NUMBERS // (2 * SIZE)
    for count in (most, most + 1):
        turn = CosSin(*(torch.zeros(count, 1, DIM, dtype=torch.bfloat16) for _ in range(2)))
        rows = torch.zeros(count, dtype=torch.int32)
        step = DecodeStep(turn, rows.long(), rows[:, None], rows)
        assert layer.supports(torch.zeros(count, HIDDEN), None, step) == (count == most)
    assert not DecodeStep(turn, rows, rows[:, None], rows).has_supported_layout
