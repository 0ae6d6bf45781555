"""`python -m kvscope_kernels.compile_report`: what each kernel takes of each GPU architecture, without a GPU.

Exits with 1 when a kernel spills registers or does not fit its multiprocessor.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from typing import Final

from kvscope_kernels.compile_cases import core_cases, shipped_cases
from kvscope_kernels.offline_compile import MAX_SHARED_BYTES, Launch, Resources, compile_for

_HEADER: Final = (
    f"{'kernel':14} {'configuration':44} {'arch':6} {'warps':>5} {'regs':>4} {'spill':>5} {'stack':>5} "
    f"{'shared':>7} {'async':>5} {'mma':>4} {'resident':>8}"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles, prints one line a kernel, configuration and architecture, and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m kvscope_kernels.compile_report", description=__doc__)
    parser.add_argument("--core", action="store_true", help="only the few configurations that hold every branch")
    parser.add_argument(
        "--arch",
        type=int,
        nargs="+",
        choices=sorted(MAX_SHARED_BYTES),
        default=sorted(MAX_SHARED_BYTES),
        help="compute capabilities to compile for (default: all)",
    )
    options = parser.parse_args(argv)
    cases = core_cases if options.core else shipped_cases
    print(_HEADER)
    num_faulty = sum(_report(cases(capability), capability) for capability in options.arch)
    print(f"{num_faulty} of these must not be shipped" if num_faulty else "no spills; all fit")
    return 1 if num_faulty else 0


def _report(launches: Iterable[Launch], capability: int) -> int:
    """Prints the lines of one architecture; the number of faulty kernels."""
    num_faulty = 0
    for launch in launches:
        resources = compile_for(launch, capability)
        print(_line(launch, resources), flush=True)
        num_faulty += bool(resources.faults)
    return num_faulty


def _line(launch: Launch, taken: Resources) -> str:
    return (
        f"{launch.name:14} {launch.variant:44} sm_{taken.capability:<3} {taken.num_warps:5} {taken.registers:4} "
        f"{taken.spill_bytes:5} {taken.stack_bytes:5} {taken.shared_bytes:7} {taken.num_async_copies:5} "
        f"{taken.num_matrix_ops:4} {taken.num_resident:8}" + "".join(f"  FAULT: {fault}" for fault in taken.faults)
    )


if __name__ == "__main__":
    sys.exit(main())
