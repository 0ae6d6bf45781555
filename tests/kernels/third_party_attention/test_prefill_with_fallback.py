"""Prefill with a library gives the same numbers as kvscope's kernels, which compute what it does not support.

Fakes with the libraries' signatures check layouts and arguments; neither library ran here.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from kvscope_kernels.attention_args import QueryRuns
from kvscope_kernels.attention_workload import AttentionWorkload, Pool, make_pool
from kvscope_kernels.dispatch import torch_ops
from kvscope_kernels.third_party_attention import prefill_with_fallback
from kvscope_kernels.third_party_attention.flash_attention import FlashAttention2, FlashAttention3
from kvscope_kernels.third_party_attention.flashinfer import FlashInfer, workspace_bytes
from kvscope_kernels.third_party_attention.library_choice import host_lengths
from kvscope_kernels.third_party_attention.prefill_with_fallback import shape_of, with_library_prefill

EVERY_OPTION = frozenset(product((False, True), (False, True)))
LIBRARIES = [(FlashInfer, 16), (FlashAttention3, 16), (FlashAttention2, 256)]
HEADS: dict[str, Any] = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.bfloat16}


def make_work(block_size: int = 16, **changes: Any) -> AttentionWorkload:
    """Return a prompt, a chunk after cached tokens, and a token in its own block."""
    return AttentionWorkload(
        name="p", seq_lens=(21, 300, 17), query_lens=(21, 40, 1), block_size=block_size, **(HEADS | changes)
    )


def prefill(ops: Any, pool: Pool, **options: Any) -> torch.Tensor:
    runs = QueryRuns(pool.query_start, pool.max_query_len, options.pop("lengths", None))
    found: torch.Tensor = ops.prefill(pool.attention_args()._replace(**options), runs)
    return found


def slots_first(pool: Pool) -> Pool:
    """Return the pool with the other order of a block: slots before heads."""
    other = pool.storage.transpose(2, 3).contiguous().transpose(2, 3)
    return replace(pool, storage=other)


@pytest.mark.parametrize(("make", "block_size"), LIBRARIES)
def test_library_gives_the_result_of_own_kernels(make: Any, block_size: int, fake_libraries: Any) -> None:
    library = make()
    ops = with_library_prefill(torch_ops(), library, EVERY_OPTION)
    batch = make_work(block_size)
    for pool in (made := make_pool(batch, "cpu"), slots_first(made)):
        for window, softcap in ((None, None), (20, None), (None, 5.0), (20, 5.0)):
            options = {"sliding_window": window, "softcap": softcap}
            expected = prefill(torch_ops(), pool, **options)
            out = torch.full_like(expected, torch.nan)
            found = prefill(ops, pool, **options, out=out, lengths=host_lengths(batch))
            assert found is out
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
            again = prefill(ops, pool, **options, lengths=host_lengths(batch))
            torch.testing.assert_close(again, expected, rtol=0, atol=0)


def test_flashinfer_plan_is_made_once_per_step_for_equal_layers(fake_libraries: Any) -> None:
    ops, batch = with_library_prefill(torch_ops(), FlashInfer(), EVERY_OPTION), make_work()
    pool = make_pool(batch, "cpu")
    for window in (None, None, 20, None, 20):
        prefill(ops, pool, sliding_window=window, lengths=host_lengths(batch))
    assert fake_libraries.wrapper.plans == 2
    longer = AttentionWorkload(name="l", seq_lens=(33, 64), query_lens=(33, 2), **HEADS)
    pool = make_pool(longer, "cpu")
    found = prefill(ops, pool, lengths=host_lengths(longer))
    torch.testing.assert_close(found, prefill(torch_ops(), pool), rtol=0, atol=0)
    assert fake_libraries.wrapper.plans == 3, "another step did not make a new plan"


def test_unsupported_options_are_computed_by_own_kernels(fake_libraries: Any) -> None:
    class MustNotRun(FlashAttention3):
        def prefill(self, given: Any) -> torch.Tensor:
            raise AssertionError("expected our kernel to run")

    ops, batch = with_library_prefill(torch_ops(), MustNotRun()), make_work()
    pool, lengths = make_pool(batch, "cpu"), host_lengths(batch)
    with pytest.raises(AssertionError, match="expected our kernel to run"):
        prefill(ops, pool, lengths=lengths)
    for options in (
        {},
        {"lengths": lengths, "sliding_window": 20},
        {"lengths": lengths, "softcap": 5.0},
        {"lengths": lengths, "sliding_window": 20, "is_chunked": True},
        {"lengths": lengths, "sinks": torch.zeros(6)},
    ):
        given = {name: value for name, value in options.items() if name != "lengths"}
        torch.testing.assert_close(prefill(ops, pool, **options), prefill(torch_ops(), pool, **given))
    for changes in ({"dtype": torch.float32}, {"head_dim": 260}, {"kv_dtype": torch.int8}):
        other = make_work(**changes)
        pool = make_pool(other, "cpu")
        found = prefill(ops, pool, lengths=host_lengths(other))
        torch.testing.assert_close(found, prefill(torch_ops(), pool))


def test_attention_library_that_does_not_support_a_shape_names_the_reason(fake_libraries: Any) -> None:
    pool = make_pool(make_work(), "cpu")
    shape = shape_of(pool.query, pool.k_cache)
    assert FlashInfer().refusal(shape) == FlashAttention3().refusal(shape) == ""
    assert FlashAttention2().refusal(shape) == "takes blocks of multiples of 256 tokens, not of 16"
    assert FlashAttention3().refusal(shape._replace(capability=80)) == "needs compute capability 9"
    assert FlashInfer().refusal(shape._replace(head_dim=96)) == "takes heads of 64, 128, 256, not of 96"
    assert FlashInfer().refusal(shape._replace(dtype=torch.float32)) == "computes in 16 bits"


@pytest.mark.parametrize("num_errors", [1, 2, 3])
def test_failing_library_is_retried_and_then_disabled(
    fake_libraries: Any, monkeypatch: pytest.MonkeyPatch, num_errors: int
) -> None:
    """The own kernels compute what it failed at; errors before a success do not count."""
    now_s = 100.0
    monkeypatch.setattr(prefill_with_fallback.time, "monotonic", lambda: now_s)

    class Failing(FlashAttention3):
        num_calls = 0
        errors_left = num_errors

        def prefill(self, given: Any) -> torch.Tensor:
            Failing.num_calls += 1
            if not Failing.errors_left:
                return super().prefill(given)
            Failing.errors_left -= 1
            raise RuntimeError("Buffer overflow when allocating memory\nfor batch_prefill_tmp_v")

    received: list[str] = []
    ops, batch = with_library_prefill(torch_ops(), Failing(), report_failure=received.append), make_work()
    pool, lengths = make_pool(batch, "cpu"), host_lengths(batch)

    def run() -> int:
        before = Failing.num_calls
        found = prefill(ops, pool, lengths=lengths)
        torch.testing.assert_close(found, prefill(torch_ops(), pool), rtol=0, atol=0)
        return Failing.num_calls - before

    for _ in range(num_errors):
        assert [run(), run()] == [1, 0]
        now_s += prefill_with_fallback.RETRY_DELAY_S
    is_given_up = num_errors == prefill_with_fallback.MAX_ERRORS
    assert run() == (0 if is_given_up else 1)
    failed = "flash-attn 3 failed; kvscope's own kernels run prompts"
    why = "RuntimeError: Buffer overflow when allocating memory"
    notes = [f"{failed} and it is tried again in 20 s: {why}", f"{failed} from here on: {why}"]
    assert received == notes[: 1 + is_given_up]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "multiprocessors", "mib"),
    [(64, 8, 128, 129.0), (64, 8, 142, 145.1), (32, 4, 142, 143.1), (28, 4, 170, 149.9), (32, 8, 132, 0.0)],
)
def test_workspace_is_large_enough_for_a_plan_with_splits(
    heads: int, kv_heads: int, multiprocessors: int, mib: float
) -> None:
    """By hand: q heads × ⌈2 × multiprocessors / KV heads⌉ × 128 queries × (128 + 1) numbers × 4 bytes."""
    size = workspace_bytes(heads, kv_heads, 128, multiprocessors) / (1 << 20)
    assert size == pytest.approx(max(mib + 1, 128.0), abs=0.1)
