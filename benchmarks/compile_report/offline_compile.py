"""Compiles a kernel for a GPU that need not be present, and reads the resources it uses. Needs Triton, but no
GPU and no driver.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvscope_kernels.triton_language import Kernel, require_triton

MAX_SHARED_BYTES: Final = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10, **dict.fromkeys((86, 89, 120), 99 << 10)}
"""Maximum shared memory of one program, by compute capability (CUDA C++ Programming Guide, table of capabilities)."""
_REGISTERS_PER_MULTIPROCESSOR: Final = 65536
_THREADS_PER_MULTIPROCESSOR: Final = {80: 2048, 90: 2048, 100: 2048, **dict.fromkeys((86, 89, 120), 1536)}


MATRIX_OP = re.compile(r"mma\.sync|wgmma\.mma_async|tcgen05\.mma")
_LABEL = re.compile(r"(\$L__BB\d+_\d+):")
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$L__BB\d+_\d+)")
_COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global[^;]*,\s*(0x[0-9a-f]+|\d+)\s*[,;]")
_LOAD = re.compile(r"\bld\.global(?:\.[\w:]+?)*?(?:\.v(\d))?\.[bsuf](\d+)\b")
_INSTRUCTION = re.compile(r"(?:@!?%p\d+\s+)?[a-z][\w.:]*\s.*;")
_WIDE_BYTES = 16


@dataclass(frozen=True, slots=True)
class LoopFigures:
    """Number of instructions by kind in one iteration of a loop, per thread."""

    num_instructions: int
    num_wide_loads: int
    """Number of loads of 16 bytes or more from global memory. Memory-bound kernels should have no narrower loads."""
    num_narrow_loads: int
    num_matrix_ops: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    name: str
    variant: str
    kernel: Kernel
    arguments: Mapping[str, str]
    """Type of each argument by name: `*bf16`, `i32`, `fp32`. Parameters that are missing here are constants."""
    constants: Mapping[str, object]
    aligned: frozenset[str]
    """Names of arguments that the launcher would find divisible by 16."""
    num_warps: int
    num_stages: int
    max_registers: int | None = None
    accepted_spill_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    registers: int
    """Registers per thread."""
    spill_bytes: int
    """Bytes of spill stores and spill loads."""
    stack_bytes: int
    shared_bytes: int
    num_async_copies: int
    num_matrix_ops: int
    """Number of mma.sync, wgmma and tcgen05 instructions."""
    num_warps: int
    capability: int
    loop: LoopFigures
    """Instructions of the loop that takes most of the time."""
    accepted_spill_bytes: int = 0

    @property
    def num_resident(self) -> int:
        threads = self.num_warps * 32
        by_registers = _REGISTERS_PER_MULTIPROCESSOR // (max(self.registers, 1) * threads)
        by_shared = (MAX_SHARED_BYTES[self.capability] + 1024) // (self.shared_bytes + 1024)
        return min(by_registers, by_shared, _THREADS_PER_MULTIPROCESSOR[self.capability] // threads)

    @property
    def occupancy(self) -> float:
        """Share of a multiprocessor's threads that resident programs use, 0 to 1."""
        return self.num_resident * self.num_warps * 32 / _THREADS_PER_MULTIPROCESSOR[self.capability]

    @property
    def faults(self) -> list[str]:
        faults = []
        if max(self.spill_bytes, self.stack_bytes) > self.accepted_spill_bytes:
            faults.append(f"spills {self.spill_bytes} bytes, stack {self.stack_bytes} bytes")
        if self.shared_bytes > MAX_SHARED_BYTES[self.capability]:
            faults.append(f"{self.shared_bytes} bytes of shared memory, {MAX_SHARED_BYTES[self.capability]} are there")
        if self.num_resident == 0:
            faults.append("does not fit a multiprocessor")
        return faults


def varying_arguments(kernel: Kernel) -> frozenset[str]:
    """Return the parameters that the launcher does not specialize on value or alignment."""
    parameters: Sequence[Any] = getattr(kernel, "params", ())
    return frozenset(p.name for p in parameters if p.do_not_specialize or p.do_not_specialize_on_alignment)


def compile_for(launch: Launch, capability: int) -> Resources:
    """Compile for a compute capability in `MAX_SHARED_BYTES`. Raises RuntimeError if Triton is missing or runs
    as an interpreter.
    """
    ptx, shared_bytes = assembly(launch, capability)
    return Resources(
        **_assembler_report(ptx, capability),
        shared_bytes=shared_bytes,
        num_async_copies=len(re.findall(r"cp\.async\.c[ag]", ptx)),
        num_matrix_ops=len(re.findall(r"mma\.sync|wgmma\.mma_async|tcgen05\.mma", ptx)),
        num_warps=launch.num_warps,
        capability=capability,
        loop=inner_loop(ptx),
        accepted_spill_bytes=launch.accepted_spill_bytes,
    )


def assembly(launch: Launch, capability: int) -> tuple[str, int]:
    """Return the PTX, and the bytes of shared memory. Raises RuntimeError as `compile_for` does."""
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # its default differs between Triton versions
    require_triton()
    import triton  # type: ignore[import-untyped]
    from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
    from triton.compiler import ASTSource  # type: ignore[import-untyped]

    if not isinstance(launch.kernel, triton.JITFunction):
        raise RuntimeError("kernels were defined for Triton's interpreter: unset TRITON_INTERPRET")
    names = list(launch.kernel.arg_names)
    source = ASTSource(
        fn=launch.kernel,
        signature={name: launch.arguments.get(name, "constexpr") for name in names},
        constexprs={name: launch.constants[name] for name in names if name not in launch.arguments},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in launch.aligned},
    )
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "maxnreg": launch.max_registers}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return compiled.asm["ptx"], compiled.metadata.shared


def _assembler_report(ptx: str, capability: int) -> dict[str, int]:
    from triton.backends.nvidia.compiler import get_ptxas  # type: ignore[import-untyped]

    target = re.search(r"\.target (sm_\w+)", ptx)
    assert target, "PTX names its target"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        command = [get_ptxas(capability).path, "-v", f"--gpu-name={target[1]}", str(path), "-o", os.devnull]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        "registers": _number(r"Used (\d+) registers", log),
        "spill_bytes": _number(r"(\d+) bytes spill stores", log) + _number(r"(\d+) bytes spill loads", log),
        "stack_bytes": _number(r"(\d+) bytes stack frame", log),
    }


def _number(pattern: str, log: str) -> int:
    match = re.search(pattern, log)
    assert match, f"the assembler reports {pattern}: {log}"
    return int(match[1])


def inner_loop(ptx: str) -> LoopFigures:
    """Return the figures of the innermost loop with the most matrix instructions, or, if there are none, the most
    loads. A kernel without loops is counted as a whole.

    Attention kernels have separate loops for tiles without and with masked rows. Among loops that are otherwise equal,
    the shortest is chosen, because it takes most of the time.
    """
    lines = [line.strip() for line in ptx.splitlines()]
    return max(map(_figures, _innermost(lines)), key=_weight, default=_figures(lines))


def _weight(loop: LoopFigures) -> tuple[int, int, int]:
    return loop.num_matrix_ops, loop.num_wide_loads + loop.num_narrow_loads, -loop.num_instructions


def _innermost(lines: Sequence[str]) -> Iterator[Sequence[str]]:
    """Yield the bodies of the loops that contain no other loop, from a label to the last branch back to that label."""
    labels = {match[1]: index for index, line in enumerate(lines) if (match := _LABEL.match(line))}
    ends: dict[int, int] = {}
    for index, line in enumerate(lines):
        branch = _BRANCH.search(line)
        if branch and labels.get(branch[1], index + 1) <= index:
            ends[labels[branch[1]]] = index
    for start, end in ends.items():
        if not any(start < other and ends[other] <= end for other in ends):
            yield lines[start : end + 1]


def _figures(lines: Sequence[str]) -> LoopFigures:
    instructions = [line for line in lines if _INSTRUCTION.match(line)]
    sizes = [size for line in lines for size in _load_bytes(line)]
    num_wide = sum(size >= _WIDE_BYTES for size in sizes)
    num_matrix_ops = sum(bool(MATRIX_OP.search(line)) for line in instructions)
    return LoopFigures(len(instructions), num_wide, len(sizes) - num_wide, num_matrix_ops)


def _load_bytes(line: str) -> Iterator[int]:
    if copy := _COPY.search(line):
        yield int(copy[1], 0)
    elif load := _LOAD.search(line):
        yield int(load[1] or 1) * int(load[2]) // 8
