"""Every branch of every kernel compiles for each architecture without a spill. No GPU is needed.

All of them in storms; some of them always."""

import os
import subprocess
import sys

import pytest

KERNELS = {
    *("paged_decode", "paged_prefill", "paged_latent", "merge_splits", "kv_write", "copy_rows"),
    *(
        "rms_norm",
        "add_rms_norm",
        "gate",
        "rotate_write",
        "allow_tokens",
        "draw_tokens",
        "block_attention",
        "plan_decode",
    ),
    *("block_bounds", "block_scores", "grouped_product", "round_rows", "skinny_linear"),
}
FEW = {"paged_decode", "paged_latent", "kv_write", "plan_decode"}
LESS_SHARED = {"paged_latent", "grouped_product", "round_rows"}
"""Compiled also for those that have less shared memory."""


@pytest.mark.parametrize(
    ("capability", "kernels"),
    [
        (90, FEW),
        *(pytest.param(capability, KERNELS, marks=pytest.mark.storm) for capability in (80, 90, 100)),
        *(pytest.param(capability, LESS_SHARED, marks=pytest.mark.storm) for capability in (86, 89, 120)),
    ],
    ids=["some kernels", "80", "90", "100", "86", "89", "120"],
)
def test_no_spills(capability: int, kernels: set[str]) -> None:
    """In its own process, since these kernels must not be those of the interpreter."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    only = [word for name in sorted(kernels) if kernels != KERNELS for word in ("--only", name)]
    command = [sys.executable, "-m", "kvscope_kernels.compile_report", "--core", "--arch", str(capability), *only]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "no spills; all fit" in run.stdout
    assert "3104 programs, 6.1 MiB of partial results" in run.stdout
    lines = [line.split() for line in run.stdout.splitlines() if f"sm_{capability}" in line]
    assert {line[0] for line in lines} == kernels
    attention = [line for line in lines if line[0].startswith("paged")]
    assert all(int(line[-8]) > 0 and int(line[-7]) > 0 for line in attention), "async copies and matrix units in use"
    for line in attention:
        occupied, num_instructions, num_wide, num_narrow, num_matrix_ops = line[-5:]
        assert 0 < int(occupied.rstrip("%")) <= 100
        assert int(num_instructions) > int(num_wide) + int(num_narrow) + int(num_matrix_ops)
        assert int(num_matrix_ops) > 0, "the loop multiplies by the matrix units"
        if "plain" in line and not {"int8", "fp8"} & set(line):
            assert int(num_wide) >= 2 * int(num_narrow) > 0, (
                f"keys in 16 bytes a thread, and their block's number: {line}"
            )
