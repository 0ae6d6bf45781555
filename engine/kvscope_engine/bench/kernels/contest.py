"""Runs a contest, in which several contenders compute one operation in one case.

Their results are compared with those of kvscope's implementation, and the contenders that agree are timed in the same
rounds.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from kvscope_engine.bench.measure import interleaved_samples
from kvscope_kernels.graph_timing import Call

OURS: Final = "kvscope"
REFERENCE: Final = "torch reference"
READ: Final = "read"
_TOLERANCE: Final = 0.05
"""Maximum difference between results that counts as agreement, relative to the largest value: far above rounding
differences, far below a different result.
"""

Sampler = Callable[[], float]
"""Function that runs all calls of a contender once and returns the seconds per call."""


class Absent(Exception):
    """Raised if a contender cannot take part. The message is a short reason."""


class BrokenDevice(Exception):
    """Raised if a contender left the device unusable for this process. The message is one line."""


@dataclass(frozen=True, slots=True)
class CallCycle:
    """Contender: a cycle of the same call on different memory, so that no call finds its data in a cache."""

    calls: Sequence[Call]
    """Calls of the cycle. Each returns its result, or None if the result should not be compared."""
    in_graph: bool = True
    """Whether a CUDA graph can capture the calls. Calls that read lengths on the host cannot be captured."""


@dataclass(slots=True, kw_only=True)
class Contest:
    kernel: str
    case: str
    num_bytes: int
    """Minimum number of bytes to read and write per call."""
    flops: int = 0
    """FLOPs per call; 0 if they are negligible."""
    contenders: dict[str, CallCycle]
    """Contenders by name. The first must be `OURS`, kvscope's implementation."""
    absent: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContenderResult:
    kernel: str
    case: str
    contender: str
    time_us: float
    num_bytes: int
    gb_per_s: float
    share_of_read: float
    """`gb_per_s` divided by the bandwidth of a plain read in the same rounds."""
    tflop_per_s: float | None
    ours_over_it: float
    """The contender's time divided by the time of kvscope's implementation. Above 1, kvscope's implementation
    is faster.
    """


@dataclass(frozen=True, slots=True)
class Result:
    rows: list[ContenderResult]
    absent: Mapping[str, str]
    read_gb_per_s: float


def measured(
    contest: Contest,
    make_sampler: Callable[[CallCycle], Sampler],
    reading: tuple[Sampler, int],
    rounds: int,
    settle: Callable[[], object] = lambda: None,
) -> Result:
    """Time all contenders that compute the same result as kvscope's implementation.

    Contenders that fail, or compute a different result, are listed as absent with the reason.

    Args:
        contest: Operation, case and contenders.
        make_sampler: Prepares a contender for timing.
        reading: Sampler of a plain read, and the number of bytes that it reads.
        rounds: Number of rounds; the median is reported.
        settle: Waits for the device, and raises errors of earlier work.

    Raises:
        BrokenDevice: A contender left the device unusable.
        Exception: Any exception that kvscope's own operation raises.
    """
    samplers: dict[str, Sampler] = {}
    absent = dict(contest.absent)
    for name, contender in _agreeing_contenders(contest, absent, settle):
        try:
            samplers[name] = make_sampler(contender)
            settle()
        except Exception as error:  # third-party libraries raise any exception; it is the reason for absence
            absent[name] = _failure_reason(contest, name, error, settle)
    samples = interleaved_samples({**samplers, READ: reading[0]}, rounds)
    times = {name: statistics.median(times_of_contender) for name, times_of_contender in samples.items()}
    read_rate = reading[1] / times.pop(READ)
    rows = [_row(contest, name, seconds, times[OURS], read_rate) for name, seconds in times.items()]
    return Result(rows, absent, read_rate / 1e9)


def first_line(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if isinstance(error, Absent) else f"{type(error).__name__}: {text.splitlines()[0]:.120}"


def _failure_reason(contest: Contest, name: str, error: Exception, settle: Callable[[], object]) -> str:
    """Return the reason why a contender failed, if the device still works.

    Raises `error` itself if kvscope's own operation failed, and BrokenDevice if the device no longer works.
    """
    try:
        settle()
    except Exception:
        raise BrokenDevice(f"{name}, {contest.kernel} {contest.case}: {first_line(error)}") from error
    if name == OURS:
        raise error
    return first_line(error)


def _agreeing_contenders(
    contest: Contest, absent: dict[str, str], settle: Callable[[], object]
) -> Iterator[tuple[str, CallCycle]]:
    """Yield the contenders whose result agrees with kvscope's, and add the reasons for all other contenders to
    `absent`.
    """
    expected: torch.Tensor | None = None
    for name, contender in contest.contenders.items():
        try:
            result = contender.calls[0]()
            settle()
            if name == OURS:
                expected = result.clone() if isinstance(result, torch.Tensor) else None
            elif not _agrees(result, expected):
                absent[name] = "its result differs from ours"
                continue
        except Exception as error:
            absent[name] = _failure_reason(contest, name, error, settle)
            continue
        yield name, contender


def _agrees(result: object, expected: torch.Tensor | None) -> bool:
    if expected is None or not isinstance(result, torch.Tensor):
        return True
    if result.shape != expected.shape:
        return False
    largest = expected.float().abs().max()
    return bool((result.float() - expected.float()).abs().max() <= _TOLERANCE * largest)


def _row(contest: Contest, name: str, seconds: float, our_seconds: float, read_rate: float) -> ContenderResult:
    rate = contest.num_bytes / seconds
    return ContenderResult(
        kernel=contest.kernel,
        case=contest.case,
        contender=name,
        time_us=seconds * 1e6,
        num_bytes=contest.num_bytes,
        gb_per_s=rate / 1e9,
        share_of_read=rate / read_rate,
        tflop_per_s=contest.flops / seconds / 1e12 if contest.flops else None,
        ours_over_it=seconds / our_seconds,
    )
