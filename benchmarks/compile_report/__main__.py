"""`python -m benchmarks.compile_report`: resources of each kernel on each GPU architecture, without a GPU.

A row of the table is a kernel in one configuration. "tile" lists the tile's rows and tokens (for linear layers: rows,
outputs and inputs; for others: elements processed at a time). Tile, warps and pipeline stages are those launched on a
GPU without an entry in a table of `tuning`. Registers are per thread; spills, stack and shared memory are in bytes.
"resident" is the number of programs that fit on a multiprocessor, "occupied" the share of its threads that they use.
The last four columns describe the inner loop in PTX: instructions, loads from global memory of 16 bytes per thread and
of fewer, matrix instructions. For a kernel without a loop, they describe the whole kernel. Exits with 1 if a kernel
spills registers or does not fit on a multiprocessor.
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
    cases = [case for capability in options.arch for case in _cases(options.cases, capability)]
    if unknown := set(options.only or ()) - {case.launch.name for case in cases}:
        parser.error(f"--only {min(unknown)}: one of {', '.join(sorted({case.launch.name for case in cases}))}")
    cases = [case for case in cases if not options.only or case.launch.name in options.only]
    print(_HEADER)
    num_faulty = num_spilling = 0
    for case, resources in zip(cases, _compiled(cases, max(1, options.jobs)), strict=True):
        print(_line(case.launch, resources), flush=True)
        num_faulty += bool(resources.faults)
        num_spilling += bool(resources.spill_bytes)
    spills = f"{num_spilling} spill what they may" if num_spilling else "no spills"
    print(f"{num_faulty} of these must not be shipped" if num_faulty else f"{spills}; all fit")
    print(decode_workspace_text(LLAMA_8B, batch=256, length=1 << 17, num_multiprocessors=132))
    return 1 if num_faulty else 0


class _Case(NamedTuple):
    """One configuration to compile, identified by its index so that it can be passed to other processes."""

    cases: str
    capability: int
    launch_index: int

    @property
    def launch(self) -> Launch:
        return _launches(self.cases, self.capability)[self.launch_index]


def _cases(cases: str, capability: int) -> list[_Case]:
    return [_Case(cases, capability, launch_index) for launch_index in range(len(_launches(cases, capability)))]


@cache
def _launches(cases: str, capability: int) -> tuple[Launch, ...]:
    return tuple(_CASES[cases](capability))


def _compiled(cases: Sequence[_Case], num_jobs: int) -> Iterator[Resources]:
    if num_jobs == 1:
        yield from map(_compile, cases)
        return
    with get_context("spawn").Pool(num_jobs) as pool:
        yield from pool.imap(_compile, cases)


def _compile(case: _Case) -> Resources:
    return compile_for(case.launch, case.capability)


def decode_workspace_text(heads: Heads, *, batch: int, length: int, num_multiprocessors: int) -> str:
    """Describe the programs that a CUDA graph of decodes launches per layer, and the memory for their partial
    results, compared with a graph without a plan.
    """
    tiles = decode_tiles(heads.head_dim, heads.head_dim, heads.group, 2)
    bounds = part_bounds(batch, length, heads.num_kv_heads, tiles.tile_n, num_multiprocessors, tiles.num_warps)
    partial_result_bytes = partial_bytes(bounds, heads.num_heads, heads.head_dim)
    num_unplanned_parts = batch * -(-length // MAX_PART_TOKENS)
    unplanned_bytes = partial_bytes(bounds._replace(num_parts=num_unplanned_parts), heads.num_heads, heads.head_dim)
    return (
        f"decode of {batch} requests of up to {length} tokens, {heads}, {num_multiprocessors} multiprocessors: "
        f"{bounds.num_parts * heads.num_kv_heads} programs, {partial_result_bytes / 2**20:.1f} MiB of partial results "
        f"(unplanned, in parts of {MAX_PART_TOKENS} tokens: {num_unplanned_parts * heads.num_kv_heads}, "
        f"{unplanned_bytes / 2**20:.1f} MiB)"
    )


def _line(launch: Launch, resources: Resources) -> str:
    tile = "x".join(str(launch.constants[name]) for name in _TILE_NAMES if name in launch.constants)
    return (
        f"{launch.name:14} {launch.variant:44} sm_{resources.capability:<3} {tile or '-':>11} {launch.num_stages:6} "
        f"{resources.num_warps:5} {resources.registers:4} "
        f"{resources.spill_bytes:5} {resources.stack_bytes:5} {resources.shared_bytes:7} "
        f"{resources.num_async_copies:5} {resources.num_matrix_ops:4} {resources.num_resident:8} "
        f"{resources.occupancy:8.0%} {resources.loop.num_instructions:5} "
        f"{resources.loop.num_wide_loads:5} {resources.loop.num_narrow_loads:6} {resources.loop.num_matrix_ops:8}"
        + "".join(f"  FAULT: {fault}" for fault in resources.faults)
    )


if __name__ == "__main__":
    sys.exit(main())
