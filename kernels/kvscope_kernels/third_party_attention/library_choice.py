"""Choice of the attention library for prompts. Each installed library that supports the model is compared with our
kernels.

The choice is made once, at startup. A library that fails, or whose results differ, is not used. Must not depend on the
engine.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch
from torch import Tensor

from kvscope_kernels.attention_args import QueryRuns
from kvscope_kernels.attention_workload import AttentionWorkload, Pool, make_pool
from kvscope_kernels.dispatch import Ops
from kvscope_kernels.host_lengths import HostLengths
from kvscope_kernels.third_party_attention.flash_attention import FlashAttention2, FlashAttention3
from kvscope_kernels.third_party_attention.flashinfer import FlashInfer
from kvscope_kernels.third_party_attention.library import AttentionShape, Library, LibraryMissing, Prefill
from kvscope_kernels.third_party_attention.prefill_with_fallback import Options, with_library_prefill

AUTO: Final = "auto"
OURS: Final = "kvscope"
FLASHINFER: Final = "flashinfer"
FLASH_ATTN: Final = "flash-attn"
MAKERS: Final[Mapping[str, Mapping[str, Callable[[], Library]]]] = {
    FLASHINFER: {"FlashInfer": FlashInfer},
    FLASH_ATTN: {"flash-attn 3": FlashAttention3, "flash-attn 2": FlashAttention2},
}
_MAX_TIME_RATIO: Final = 0.97
"""Maximum time of a library, divided by that of our kernels, for which the library is used. The gain must
exceed the noise of the measurement.
"""
_TOLERANCE: Final = 0.02
"""Allowed difference of results, relative to the largest absolute value: above 16-bit rounding, below the error
of a wrong result.
"""
_ROUNDS: Final = 5
_WINDOW: Final = 300
_SOFTCAP: Final = 30.0

Call = Callable[[], Tensor]
Clock = Callable[[Call], float]
"""Measures the seconds of one call."""


class Unusable(Exception):
    """Raised if a library requested by name cannot be used. The message is the reason."""


@dataclass(frozen=True, slots=True)
class LibraryChoice:
    ops: Ops
    description: str
    """User-visible explanation on one line."""
    failures: list[str] = field(default_factory=list)
    """User-visible texts about failures of a library while serving, appended when they happen."""


def choose(
    ops: Ops,
    shape: AttentionShape,
    device: torch.device,
    wanted: str,
    options: Sequence[Options],
    clock: Clock,
    report: Callable[[str], object] = lambda _: None,
) -> LibraryChoice:
    """Choose the fastest library if `wanted` is "auto", else the named one.

    Args:
        ops: Our operations.
        shape: Shape of the model's attention.
        device: Device on which to measure.
        wanted: "auto", "kvscope", or the name of a library.
        options: Options of the model's layers.
        clock: Measures a call.
        report: Called with a line before a library is tried, because it may compile its kernels first: FlashInfer took
            86 s on an H100's host.

    Raises:
        Unusable: The named library cannot be used.
    """
    if wanted == OURS:
        return LibraryChoice(ops, "attention: kvscope's own kernels")
    refusals: dict[str, str] = {}
    ratios: dict[str, float] = {}
    libraries: dict[str, Library] = {}
    for name, make in _makers(wanted):
        try:
            library = make()
            if why := library.refusal(shape):
                raise LibraryMissing(why)
            report(f"trying {library.name}, whose kernels are compiled when they are first used")
            with_library = with_library_prefill(ops, library, frozenset(options))
            ratios[library.name] = _time_ratio(ops, with_library, shape, device, options, clock)
            libraries[library.name] = library
        except LibraryMissing as missing:
            refusals[name] = str(missing)
        except Exception as error:  # any error of the library, its compiler or driver: do not use it
            refusals[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    if wanted != AUTO and not libraries:
        raise Unusable("; ".join(f"{name}: {why}" for name, why in refusals.items()))
    best = min(ratios, key=ratios.__getitem__, default="")
    if wanted == AUTO:
        results = [f"{name}: {reason}" for name, reason in refusals.items()]
        results += [f"{name}: {_ratio_text(ratio)}" for name, ratio in ratios.items()]
        if not best or ratios[best] >= _MAX_TIME_RATIO:
            return LibraryChoice(ops, f"attention: kvscope's own kernels ({'; '.join(results)})")
        description = f"attention: {best} for prompts ({'; '.join(results)})"
    else:
        description = f"attention: {best} for prompts, as asked for, {_ratio_text(ratios[best])}"
    failures: list[str] = []
    return LibraryChoice(
        with_library_prefill(ops, libraries[best], frozenset(options), failures.append), description, failures
    )


def installed() -> dict[str, str]:
    """Return, by library name, the version, or why the library cannot be imported."""
    return {
        name: str(library) if isinstance(library, LibraryMissing) else library.name
        for name, library in _imported().items()
    }


def importable() -> tuple[str, ...]:
    """Return the names and versions of the libraries that `choose` would compare on a GPU."""
    return tuple(library.name for library in _imported().values() if not isinstance(library, LibraryMissing))


def _imported() -> dict[str, Library | LibraryMissing]:
    libraries: dict[str, Library | LibraryMissing] = {}
    for name, make in _makers(AUTO):
        try:
            libraries[name] = make()
        except LibraryMissing as missing:
            libraries[name] = missing
    return libraries


def by_events(call: Call) -> float:
    """Measure a call with CUDA events (a `Clock` for GPUs)."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def host_lengths(work: AttentionWorkload) -> HostLengths:
    starts = torch.tensor([0, *(work.query_lens or ())]).cumsum(0).to(torch.int32)
    return HostLengths(starts.numpy(), torch.tensor(work.seq_lens, dtype=torch.int32).numpy())


def _makers(wanted: str) -> list[tuple[str, Callable[[], Library]]]:
    chosen = MAKERS.values() if wanted == AUTO else [MAKERS[wanted]]
    return [each for makers in chosen for each in makers.items()]


def prefill_of(work: AttentionWorkload, pool: Pool) -> Prefill:
    runs = QueryRuns(pool.query_start, pool.max_query_len, host_lengths(work))
    return Prefill(pool.attention_args(), runs, host_lengths(work))


def _ratio_text(ratio: float) -> str:
    return f"{ratio:.2f} of our time"


def _time_ratio(
    ours: Ops, theirs: Ops, shape: AttentionShape, device: torch.device, options: Sequence[Options], clock: Clock
) -> float:
    """Return the library's time divided by ours, over whole prompts and over chunks after cached tokens.

    Raises LibraryMissing if the results differ.
    """
    total = {False: 0.0, True: 0.0}
    for work in workloads_of(shape):
        pool = make_pool(work, str(device))
        for window, softcap in options:
            layer_options = (_WINDOW if window else None, _SOFTCAP if softcap else None)
            calls = {
                times_s is theirs: partial(_run, times_s, pool, work, *layer_options) for times_s in (ours, theirs)
            }
            expected, result = calls[False](), calls[True]()
            if not _is_close(result, expected):
                raise LibraryMissing("its results differ from those of our kernels")
            times = {is_theirs: [clock(call) for _ in range(_ROUNDS)] for is_theirs, call in calls.items()}
            for is_theirs, times_s in times.items():
                total[is_theirs] += min(times_s)
    return total[True] / total[False]


def workloads_of(shape: AttentionShape) -> tuple[AttentionWorkload, ...]:
    make_workload = partial(
        AttentionWorkload,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=shape.block_size,
        dtype=shape.dtype,
    )
    return (
        make_workload(name="prompts", seq_lens=(1024, 517, 1024), query_lens=(1024, 517, 1024)),
        make_workload(name="chunk", seq_lens=(2603,), query_lens=(500,)),
        make_workload(
            name="turn", seq_lens=(5003,), query_lens=(12,)
        ),  # libraries split its keys over several programs
    )


def _run(ops: Ops, pool: Pool, work: AttentionWorkload, sliding_window: int | None, softcap: float | None) -> Tensor:
    args = pool.attention_args(sliding_window=sliding_window, softcap=softcap)
    return ops.prefill(args, QueryRuns(pool.query_start, pool.max_query_len, host_lengths(work)))


def _is_close(result: Tensor, expected: Tensor) -> bool:
    difference = (result.float() - expected.float()).abs().max()
    return bool(difference <= _TOLERANCE * expected.float().abs().max())
