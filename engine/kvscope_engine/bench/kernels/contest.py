"""One operation in one case, by several contenders: checked against each other, timed in the same rounds."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from kvscope_engine.bench.measure import in_turns
from kvscope_kernels.graph_timing import Call

OURS: Final = "kvscope"
REFERENCE: Final = "torch reference"
READ: Final = "read"
_TOLERANCE: Final = 0.05
"""Of the largest number: far above what types round, far below what another answer would be."""

Sampler = Callable[[], float]
"""Times all calls of a contender once; seconds of one."""


class Absent(Exception):
    """Why a contender does not take part, in a few words."""


class BrokenDevice(Exception):
    """After whose work the device takes no more of this process, in a line."""


@dataclass(frozen=True, slots=True)
class CallCycle:
    """One contender: a cycle of the same call on other memory, so that no call finds its data in a cache."""

    calls: Sequence[Call]
    """Each returns what it computed, or None where it is not compared."""
    in_graph: bool = True
    """Whether a CUDA graph can hold it: what looks at lengths on the host cannot be."""


@dataclass(slots=True, kw_only=True)
class Contest:
    """One operation in one case."""

    kernel: str
    case: str
    num_bytes: int
    """That have to be read and written once."""
    flops: int = 0
    """0: none to speak of."""
    contenders: dict[str, CallCycle]
    """`OURS` first."""
    absent: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContenderResult:
    """One contender's result."""

    kernel: str
    case: str
    contender: str
    time_us: float
    num_bytes: int
    gb_per_s: float
    share_of_read: float
    """Of the bytes a second that a plain read moved in the same rounds."""
    tflop_per_s: float | None
    ours_over_it: float
    """Above 1: ours is faster."""


@dataclass(frozen=True, slots=True)
class Result:
    """Of one contest."""

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
    """Time all that do the same as ours; `reading` is how a read is timed and the bytes that it takes; `settle` waits
    for the device, and raises what went wrong there.

    Raises what ours raises, and BrokenDevice where somebody left the device unusable. Others that fail, or compute
    something else, are absent with the reason.
    """
    samplers: dict[str, Sampler] = {}
    absent = dict(contest.absent)
    for name, contender in _agreeing(contest, absent, settle):
        try:
            samplers[name] = make_sampler(contender)
            settle()
        except Exception as error:  # other people's libraries: whatever they raise is why they are absent
            absent[name] = _survived(contest, name, error, settle)
    samples = in_turns({**samplers, READ: reading[0]}, rounds)
    times = {name: statistics.median(found) for name, found in samples.items()}
    read = reading[1] / times.pop(READ)
    rows = [_row(contest, name, seconds, times[OURS], read) for name, seconds in times.items()]
    return Result(rows, absent, read / 1e9)


def first_line(error: Exception) -> str:
    """An error in a few words."""
    text = str(error) or type(error).__name__
    return text if isinstance(error, Absent) else f"{type(error).__name__}: {text.splitlines()[0]:.120}"


def _survived(contest: Contest, name: str, error: Exception, settle: Callable[[], object]) -> str:
    """Why somebody failed, if the device outlived it. Raises what ours raised, and BrokenDevice."""
    try:
        settle()
    except Exception:
        raise BrokenDevice(f"{name}, {contest.kernel} {contest.case}: {first_line(error)}") from error
    if name == OURS:
        raise error
    return first_line(error)


def _agreeing(
    contest: Contest, absent: dict[str, str], settle: Callable[[], object]
) -> Iterator[tuple[str, CallCycle]]:
    """Those whose result is ours, one by one; why others are not goes to `absent`."""
    expected: torch.Tensor | None = None
    for name, contender in contest.contenders.items():
        try:
            found = contender.calls[0]()
            settle()
            if name == OURS:
                expected = found.clone() if isinstance(found, torch.Tensor) else None
            elif not _agrees(found, expected):
                absent[name] = "computes something else"
                continue
        except Exception as error:
            absent[name] = _survived(contest, name, error, settle)
            continue
        yield name, contender


def _agrees(found: object, expected: torch.Tensor | None) -> bool:
    if expected is None or not isinstance(found, torch.Tensor):
        return True
    if found.shape != expected.shape:
        return False
    largest = expected.float().abs().max()
    return bool((found.float() - expected.float()).abs().max() <= _TOLERANCE * largest)


def _row(contest: Contest, name: str, seconds: float, ours: float, read: float) -> ContenderResult:
    rate = contest.num_bytes / seconds
    return ContenderResult(
        kernel=contest.kernel,
        case=contest.case,
        contender=name,
        time_us=seconds * 1e6,
        num_bytes=contest.num_bytes,
        gb_per_s=rate / 1e9,
        share_of_read=rate / read,
        tflop_per_s=contest.flops / seconds / 1e12 if contest.flops else None,
        ours_over_it=seconds / ours,
    )
