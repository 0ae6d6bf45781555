"""Loops are found in the PTX that Triton writes."""

from benchmarks.compile_report.offline_compile import LoopFigures, inner_loop

NESTED = """
\tld.global.b32 %r1, [%rd1];
$L__BB0_1:
\tadd.s32 %r2, %r2, 1;
$L__BB0_2:                              // inside
\tcp.async.cg.shared.global [ %r316 + 0 ], [ %rd136 + 0 ], 0x10, %r317;
\tcp.async.ca.shared.global [ %r318 + 0 ], [ %rd137 + 0 ], 0x4, %r317;
\t@%p1 ld.global.v4.b32 {%r1,%r2,%r3,%r4}, [%rd2];
\t@%p1 ld.global.L1::evict_last.v2.b32 {%r1,%r2}, [%rd2];
\tmma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1}, {%r1}, {%r2}, {%f1};
\t@%p2 bra $L__BB0_2;
\t@%p3 bra.uni $L__BB0_1;
\tret;
"""


def test_only_the_innermost_of_nested_loops_is_counted() -> None:
    assert inner_loop(NESTED) == LoopFigures(6, num_wide_loads=2, num_narrow_loads=2, num_matrix_ops=1)


def test_shorter_of_two_equal_loops_is_counted() -> None:
    body = "\tmma.sync.aligned.m16n8k16 {%f1}, {%r1};\n"
    loops = f"$L__BB0_1:\n{body}\tadd.s32 %r1, %r1, 1;\n@%p1 bra $L__BB0_1;\n$L__BB0_3:\n{body}@%p1 bra $L__BB0_3;\n"
    assert inner_loop(loops).num_instructions == 2


def test_instructions_of_ptx_without_a_loop_are_all_counted() -> None:
    straight = "\tld.global.v2.b64 {%rd1,%rd2}, [%rd3];\n\t@%p1 bra $L__BB0_2;\n$L__BB0_2:\n\tret;\n"
    assert inner_loop(straight) == LoopFigures(2, num_wide_loads=1, num_narrow_loads=0, num_matrix_ops=0)
