"""The inner loop of a compiled kernel, found in its PTX, and what it is made of. Reads text alone."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MATRIX_OP = re.compile(r"mma\.sync|wgmma\.mma_async|tcgen05\.mma")
_LABEL = re.compile(r"(\$L__BB\d+_\d+):")
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$L__BB\d+_\d+)")
_COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global[^;]*,\s*(0x[0-9a-f]+|\d+)\s*[,;]")
_LOAD = re.compile(r"\bld\.global(?:\.[\w:]+?)*?(?:\.v(\d))?\.[bsuf](\d+)\b")
_INSTRUCTION = re.compile(r"(?:@!?%p\d+\s+)?[a-z][\w.:]*\s.*;")
_WIDE_BYTES = 16


@dataclass(frozen=True, slots=True)
class LoopFigures:
    """What one turn of a loop is made of, a thread."""

    num_instructions: int
    num_wide_loads: int
    """From global memory, 16 bytes or more at once: what a memory-bound kernel should have alone."""
    num_narrow_loads: int
    num_matrix_ops: int


def inner_loop(ptx: str) -> LoopFigures:
    """Of the innermost loop with the most matrix instructions, or loads where none has any; of all where none loops.

    A tile that no row needs to be masked in and the one that ends a prompt are loops of their own: of two that are
    equal otherwise, the shorter is the one that most of the time goes to.
    """
    lines = [line.strip() for line in ptx.splitlines()]
    return max(map(_figures, _innermost(lines)), key=_weight, default=_figures(lines))


def _weight(loop: LoopFigures) -> tuple[int, int, int]:
    return loop.num_matrix_ops, loop.num_wide_loads + loop.num_narrow_loads, -loop.num_instructions


def _innermost(lines: Sequence[str]) -> Iterator[Sequence[str]]:
    """Bodies of the loops that hold no other: from a label to the last branch back to it."""
    labels = {match[1]: at for at, line in enumerate(lines) if (match := _LABEL.match(line))}
    ends: dict[int, int] = {}
    for at, line in enumerate(lines):
        found = _BRANCH.search(line)
        if found and labels.get(found[1], at + 1) <= at:
            ends[labels[found[1]]] = at
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
