"""The library for CPUs without AVX-512, compiled for the oldest of them, gives the same numbers."""

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvscope_kernels.attention_args import AttentionArgs, QueryRuns
from kvscope_kernels.cpu import decode, grouped, linear, prefill
from kvscope_kernels.cpu.compiler import OPTIONS_VARIABLE, built_library
from kvscope_kernels.cpu.library import library, load_library
from kvscope_kernels.paged_decode_attention import paged_decode_attention_torch
from kvscope_kernels.paged_prefill_attention import paged_prefill_attention_torch
from kvscope_kernels.quantized_linear.grouped_weight import rounded

pytestmark = pytest.mark.skipif(library() is None, reason="needs a C compiler")


@pytest.fixture(scope="module")
def plain_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVSCOPE_CACHE", str(tmp_path_factory.mktemp("plain_library")))
        patch.setenv(OPTIONS_VARIABLE, "-march=x86-64 -O1")
        path = built_library()
    found = None if path is None else load_library(path)
    if found is None:
        pytest.skip("no x86 processor, or a compiler that knows none")
    return found


@pytest.fixture(autouse=True)
def _use_plain_library(plain_library: ctypes.CDLL) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "library", lambda: plain_library)
        patch.setattr(decode, "library", lambda: plain_library)
        patch.setattr(grouped, "library", lambda: plain_library)
        patch.setattr(prefill, "library", lambda: plain_library)
        yield


def random_tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_plain_library_has_no_dot_product_instructions(plain_library: ctypes.CDLL) -> None:
    assert plain_library.kvscope_has_dot_product() == 0


@pytest.mark.parametrize("rows", [1, 5])
def test_int8_products_on_old_cpus_equal_the_reference(rows: int) -> None:
    x, weight = random_tensor(rows, 333), random_tensor(130, 333, seed=1)
    expected = linear.int8_product_torch(x, weight)
    found = linear.Int8Weight(weight).product(x)
    assert float((found.double() - expected).norm()) <= 2e-3 * float(expected.norm())


@pytest.mark.parametrize("bits", [4, 8])
def test_grouped_products_on_old_cpus_equal_the_reference(bits: int) -> None:
    x, weight = random_tensor(5, 333), rounded(random_tensor(130, 333, seed=1), bits, 64)
    expected = grouped.native_product_torch(x, weight)
    found = grouped.NativeGrouped(weight, rounds_activations=True).product(x)
    assert float((found.double() - expected).norm()) <= 2e-3 * float(expected.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 8])
def test_grouped_products_with_unrounded_activations_on_old_cpus_equal_the_reference(
    bits: int, dtype: torch.dtype
) -> None:
    x, weight = random_tensor(5, 333).to(dtype), rounded(random_tensor(130, 333, seed=1), bits, 64)
    expected = x.double() @ weight.widened().double().T
    found = grouped.NativeGrouped(weight).product(x, dtype=torch.float32)
    assert float((found.double() - expected).norm()) <= 1e-6 * float(expected.norm())


def widened(args: AttentionArgs) -> AttentionArgs:
    query, k_cache, v_cache = (tensor.float() for tensor in args[:3])
    return args._replace(query=query, k_cache=k_cache, v_cache=v_cache, out=None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(3, 3), (9, 3), (8, 1)])
@pytest.mark.parametrize(("window", "is_chunked"), [(None, False), (20, False), (20, True)])
@pytest.mark.parametrize("head_dim", [16, 80, 128])
def test_decode_attention_on_old_cpus_equals_the_reference(
    dtype: torch.dtype, heads: tuple[int, int], window: int | None, is_chunked: bool, head_dim: int
) -> None:
    num_heads, kv_heads = heads
    query = random_tensor(4, num_heads, head_dim).to(dtype)
    k_cache, v_cache = (random_tensor(24, 16, kv_heads, head_dim, seed=seed).to(dtype) for seed in (1, 2))
    tables = torch.randperm(24, generator=torch.Generator().manual_seed(3)).view(4, 6).int()
    lengths = torch.tensor([1, 0, 17, 90], dtype=torch.int32)
    out = torch.full_like(query, float("nan"))
    options = head_dim**-0.5, window, None, random_tensor(num_heads, seed=4)
    args = AttentionArgs(query, k_cache, v_cache, tables, lengths, *options, out=out, is_chunked=is_chunked)
    decode.paged_decode_attention_native(args)
    expected = paged_decode_attention_torch(widened(args))
    allowed = 1e-5 if dtype == torch.float32 else 1e-2
    assert float((out.float() - expected).norm()) <= allowed * float(expected.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 20, "softcap": 2.0}, {"sliding_window": 20, "is_chunked": True}]
)
@pytest.mark.parametrize("head_dim", [16, 80])
def test_prefill_attention_on_old_cpus_equals_the_reference(
    dtype: torch.dtype, options: dict[str, Any], head_dim: int
) -> None:
    query = random_tensor(71, 9, head_dim).to(dtype)
    k_cache, v_cache = (random_tensor(24, 16, 3, head_dim, seed=seed).to(dtype) for seed in (1, 2))
    tables = torch.randperm(24, generator=torch.Generator().manual_seed(3)).view(3, 8).int()
    starts, lengths = (torch.tensor(each, dtype=torch.int32) for each in ([0, 1, 1, 71], [17, 0, 90]))
    given = query, k_cache, v_cache, tables, lengths, head_dim**-0.5
    args, runs = AttentionArgs(*given, sinks=random_tensor(9, seed=4), **options), QueryRuns(starts, 70)
    found = prefill.paged_prefill_attention_native(args, runs)
    expected = paged_prefill_attention_torch(widened(args), runs)
    allowed = 1e-5 if dtype == torch.float32 else 1e-2
    assert float((found.float() - expected).norm()) <= allowed * float(expected.norm())
