"""`python -m benchmarks.compile_report`: what each kernel takes of each GPU architecture, without a GPU.

The table of tiles: a tile's rows and tokens (of products rows, outputs and inputs; of others what they take at once),
warps and pipeline stages are those that a launch takes on a GPU that no table of `tuning` knows. Registers are a
thread's, spills, stack and shared memory bytes; "resident" are the programs that fit a multiprocessor at once,
"occupied" is the share of its threads that they are. The last four columns are of the inner loop, in PTX:
instructions, loads from global memory of 16 bytes a thread and of fewer, matrix instructions; a kernel without a loop
is counted whole. Exits with 1 when a kernel spills registers or does not fit its multiprocessor.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from multiprocessing import get_context
from typing import Final, NamedTuple

from benchmarks.compile_report.cases import LLAMA_8B, Heads, candidate_cases, core_cases, few_cases, shipped_cases
from benchmarks.compile_report.offline_compile import MAX_SHARED_BYTES, Launch, Resources, compile_for
from kvscope_kernels.decode.bounds import MAX_PART_TOKENS, part_bounds, partial_bytes
from kvscope_kernels.launch import decode_tiles

_CASES: Final = {"all": shipped_cases, "core": core_cases, "few": few_cases, "candidates": candidate_cases}
_TILE_NAMES: Final = ("TILE", "TILE_M", "TILE_P", "TILE_S", "TILE_N", "TILE_K", "TILE_B")
_HEADER: Final = (
    f"{'kernel':14} {'configuration':44} {'arch':6} {'tile':>11} {'stages':>6} {'warps':>5} {'regs':>4} {'spill':>5} "
    f"{'stack':>5} {'shared':>7} {'async':>5} {'mma':>4} {'resident':>8} {'occupied':>8} {'loop':>5} {'wide':>5} "
    f"{'narrow':>6} {'loop mma':>8}"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles, prints one line a kernel, configuration and architecture, and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compile_report", description=__doc__)
    parser.add_argument(
        "--cases",
        choices=_CASES,
        default="all",
        help="configurations: some that hold every branch (core), those nearest to the limits (few), or tiles that "
        "bench kernels --tune tries for a short turn, not all of which fit (candidates)",
    )
    parser.add_argument("--only", action="append", metavar="KERNEL", help="one of them; repeatable (default: all)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes that compile at once (default: 1)")
    parser.add_argument(
        "--arch",
        type=int,
        nargs="+",
        choices=sorted(MAX_SHARED_BYTES),
        default=sorted(MAX_SHARED_BYTES),
        help="compute capabilities to compile for (default: all)",
    )
    options = parser.parse_args(argv)
    wanted = [case for capability in options.arch for case in _cases(options.cases, capability)]
    if unknown := set(options.only or ()) - {case.launch.name for case in wanted}:
        parser.error(f"--only {min(unknown)}: one of {', '.join(sorted({case.launch.name for case in wanted}))}")
    wanted = [case for case in wanted if not options.only or case.launch.name in options.only]
    print(_HEADER)
    num_faulty = num_spilling = 0
    for case, resources in zip(wanted, _compiled(wanted, max(1, options.jobs)), strict=True):
        print(_line(case.launch, resources), flush=True)
        num_faulty += bool(resources.faults)
        num_spilling += bool(resources.spill_bytes)
    spills = f"{num_spilling} spill what they may" if num_spilling else "no spills"
    print(f"{num_faulty} of these must not be shipped" if num_faulty else f"{spills}; all fit")
    print(decode_room(LLAMA_8B, batch=256, length=1 << 17, num_multiprocessors=132))
    return 1 if num_faulty else 0


class _Case(NamedTuple):
    """One configuration; other processes find it by its place."""

    cases: str
    capability: int
    place: int

    @property
    def launch(self) -> Launch:
        return _launches(self.cases, self.capability)[self.place]


def _cases(cases: str, capability: int) -> list[_Case]:
    return [_Case(cases, capability, place) for place in range(len(_launches(cases, capability)))]


@cache
def _launches(cases: str, capability: int) -> tuple[Launch, ...]:
    return tuple(_CASES[cases](capability))


def _compiled(cases: Sequence[_Case], num_jobs: int) -> Iterator[Resources]:
    """In the order of `cases`."""
    if num_jobs == 1:
        yield from map(_compile, cases)
        return
    with get_context("spawn").Pool(num_jobs) as pool:
        yield from pool.imap(_compile, cases)


def _compile(case: _Case) -> Resources:
    return compile_for(case.launch, case.capability)


def decode_room(heads: Heads, *, batch: int, length: int, num_multiprocessors: int) -> str:
    """What a graph of decodes launches a layer, and keeps for all of them, beside what each at its longest would."""
    tiles = decode_tiles(heads.head_dim, heads.head_dim, heads.group, 2)
    bounds = part_bounds(batch, length, heads.num_kv_heads, tiles.tile_n, num_multiprocessors, tiles.num_warps)
    kept = partial_bytes(bounds, heads.num_heads, heads.head_dim)
    parts = batch * -(-length // MAX_PART_TOKENS)
    every = partial_bytes(bounds._replace(num_parts=parts), heads.num_heads, heads.head_dim)
    return (
        f"decode of {batch} requests of up to {length} tokens, {heads}, {num_multiprocessors} multiprocessors: "
        f"{bounds.num_parts * heads.num_kv_heads} programs, {kept / 2**20:.1f} MiB of partial results "
        f"(unplanned, in parts of {MAX_PART_TOKENS} tokens: {parts * heads.num_kv_heads}, {every / 2**20:.1f} MiB)"
    )


def _line(launch: Launch, taken: Resources) -> str:
    tile = "x".join(str(launch.constants[name]) for name in _TILE_NAMES if name in launch.constants)
    return (
        f"{launch.name:14} {launch.variant:44} sm_{taken.capability:<3} {tile or '-':>11} {launch.num_stages:6} "
        f"{taken.num_warps:5} {taken.registers:4} "
        f"{taken.spill_bytes:5} {taken.stack_bytes:5} {taken.shared_bytes:7} {taken.num_async_copies:5} "
        f"{taken.num_matrix_ops:4} {taken.num_resident:8} {taken.occupancy:8.0%} {taken.loop.num_instructions:5} "
        f"{taken.loop.num_wide_loads:5} {taken.loop.num_narrow_loads:6} {taken.loop.num_matrix_ops:8}"
        + "".join(f"  FAULT: {fault}" for fault in taken.faults)
    )


if __name__ == "__main__":
    sys.exit(main())
