"""Every variant of every kernel compiles for each architecture without a spill. No GPU is needed.

Storms compile all of them, other runs only some.
"""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.compile_report.cases import GPT_OSS_EXPERTS, LLAMA_8B, expert_cases, round_case
from benchmarks.compile_report.offline_compile import assembly
from kvscope_kernels.fused_moe.expert_weights import RELU_SQUARED

ROOT = Path(__file__).parents[3]
KERNELS = {
    *("paged_decode", "paged_prefill", "paged_latent", "merge_splits", "kv_write", "copy_rows"),
    *(
        "rms_norm",
        "add_rms_norm",
        "gate",
        "rotate_write",
        "allow_tokens",
        "draw_tokens",
        "plan_decode",
    ),
    *("block_bounds", "block_scores", "grouped_product", "round_rows", "skinny_linear"),
    *("align_experts", "expert_product", "sum_experts"),
}
FEW = {"paged_decode", "paged_prefill", "paged_latent", "skinny_linear"}
ALL = ("80", "86", "89", "90", "100", "120")
AS_80 = ("86", "89")
"""Capabilities that use the instructions of 80 with less shared memory, which the next test checks."""


@pytest.mark.storm
@pytest.mark.parametrize("capabilities", [ALL[:3], ALL[3:]], ids=" ".join)
def test_kernels_nearest_to_the_memory_limits_compile_for_every_gpu_architecture(capabilities: tuple[str, ...]) -> None:
    """The kernels fit in the shared memory and registers even of GPUs with 99 KiB of shared memory."""
    for capability, lines in report("few", *capabilities).items():
        assert {line[0] for line in lines} == FEW
        assert len(lines) == 5, capability


@pytest.mark.storm
@pytest.mark.timeout(1_500)
@pytest.mark.parametrize("capability", [each for each in ALL if each not in AS_80])
def test_kernels_compile_without_spills(capability: str) -> None:
    lines = report("core", capability)[capability]
    assert {line[0] for line in lines} == KERNELS
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


@pytest.mark.parametrize("capability", [80, 120])
def test_compiled_rounding_and_clamping_kernels_keep_nan(capability: int) -> None:
    """The interpreter always keeps NaN; the plain minimum and maximum of a GPU drop it."""
    pytest.importorskip("triton")
    up = next(iter(expert_cases(GPT_OSS_EXPERTS)))
    squared = replace(up, constants={**up.constants, "ACTIVATION": RELU_SQUARED, "IS_GATED": False, "LIMIT": None})
    for launch in (round_case(LLAMA_8B, capability), up, squared):
        ptx, _ = assembly(launch, capability)
        assert re.search(r"(min|max)\.NaN", ptx)
        assert not re.findall(r"(?:min|max)(?:\.ftz)?\.f32.*", ptx), launch.name


def report(cases: str, *capabilities: str) -> dict[str, list[list[str]]]:
    """Return the words of the report lines by capability, and check that none reports a fault. It runs in its own
    process, because these kernels must not be those of the interpreter.
    """
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    module = [sys.executable, "-m", "benchmarks.compile_report"]
    command = [*module, "--cases", cases, "--arch", *capabilities]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "; all fit" in run.stdout
    assert "3104 programs, 6.1 MiB of partial results" in run.stdout
    lines = [line.split() for line in run.stdout.splitlines() if " sm_" in line]
    return {each: [line for line in lines if f"sm_{each}" in line] for each in capabilities}
