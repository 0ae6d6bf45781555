"""The benchmark's workloads, counts and table, on the CPU's operations with small batches. No speed is claimed."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.warm_python import WarmPython

from kvscope_kernels import ops_for
from kvscope_kernels.benchmark.__main__ import print_table
from kvscope_kernels.benchmark.calls import ExpertsWorkload
from kvscope_kernels.benchmark.rows import (
    decode_rows,
    expert_rows,
    layer_rows,
    prefill_rows,
    product_rows,
    quantized_rows,
    skew_rows,
    turn_rows,
    write_rows,
)
from kvscope_kernels.benchmark.stream_read import stream_read, stream_read_torch, sums_for
from kvscope_kernels.benchmark.timing import capture
from kvscope_kernels.benchmark.workload import AttentionWorkload, make_pool

SMALL = AttentionWorkload(name="small", seq_lens=(40, 17), num_heads=6, num_kv_heads=2, head_dim=64)
QUANTIZED = [replace(SMALL, name=str(dtype), kv_dtype=dtype) for dtype in (torch.int8, torch.float8_e4m3fn)]


def host_timer(contenders: Mapping[str, Sequence[Any]]) -> dict[str, float]:
    times = {}
    for name, calls in contenders.items():
        start = time.perf_counter()
        for call in calls:
            call()
        times[name] = time.perf_counter() - start
    return times


def test_every_row_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    ops = ops_for("cpu")
    whole = AttentionWorkload(
        name="whole", seq_lens=(20, 20), query_lens=(20, 20), num_heads=6, num_kv_heads=2, head_dim=64
    )
    continued = AttentionWorkload(
        name="continued", seq_lens=(40,), query_lens=(3,), num_heads=6, num_kv_heads=2, head_dim=64
    )
    rows = [
        *decode_rows(ops, "cpu", host_timer, [SMALL]),
        *skew_rows(ops, "cpu", host_timer, SMALL),
        *quantized_rows(ops, "cpu", host_timer, QUANTIZED),
        *write_rows(ops, "cpu", host_timer, [SMALL, *QUANTIZED]),
        *product_rows("cpu", host_timer, [3], (64, 96)),
        *layer_rows(ops, "cpu", host_timer, [3]),
        *expert_rows(ops, "cpu", host_timer, [ExpertsWorkload(3, 4, 2, 32, 16)]),
        *turn_rows(ops, "cpu", host_timer, [continued]),
        *prefill_rows(ops, "cpu", host_timer, [whole, continued, *QUANTIZED]),
    ]
    print_table(rows)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 1 + len(rows) == 21
    assert all(row.time_us > 0 and row.rate > 0 for row in rows)
    assert printed[1].startswith("decode small ")
    assert " x read" in printed[1]
    assert " x " not in printed[-1]


def test_bytes_and_operations_are_counted_once() -> None:
    assert SMALL.kv_bytes == 57 * 2 * 64 * 2 * 2
    assert QUANTIZED[0].kv_bytes == 57 * 2 * 2 * (64 + 4)
    assert AttentionWorkload(name="", seq_lens=(3,), query_lens=(3,), num_heads=1, head_dim=1).flops == 4 * (1 + 2 + 3)
    assert AttentionWorkload(name="", seq_lens=(10,), query_lens=(2,), num_heads=1, head_dim=1).flops == 4 * (9 + 10)


def test_tables_name_each_block_once() -> None:
    for is_permuted in (True, False):
        pool = make_pool(SMALL, "cpu", is_permuted=is_permuted)
        assert sorted([*pool.block_tables[0, :3].tolist(), *pool.block_tables[1, :2].tolist()]) == [0, 1, 2, 3, 4]


def test_last_slots_are_those_of_the_last_tokens() -> None:
    work = AttentionWorkload(name="", seq_lens=(18, 3), query_lens=(4, 1), num_heads=2, num_kv_heads=1, head_dim=16)
    pool = make_pool(work, "cpu", is_permuted=False)
    assert pool.last_slots().tolist() == [14, 15, 16, 17, 2 * 16 + 2]


def test_stream_read_sums_every_word(interpret: Any) -> None:
    data = torch.randint(-9999, 9999, (100_001,), dtype=torch.int32)
    found, expected = sums_for(data).fill_(7)[:5], torch.empty(1, dtype=torch.int32)
    interpret(stream_read, data, found)
    stream_read_torch(data, expected)
    assert found.sum(dtype=torch.int32) == expected[0]


def test_a_capture_that_fails_leaves_the_stream_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own context does not, where the end of the capture fails as well."""
    usual = SimpleNamespace(wait_stream=lambda _: None)
    streams = [usual]

    @contextmanager
    def stream(entered: Any) -> Iterator[None]:
        before = streams[-1]
        streams.append(entered)
        try:
            yield
        finally:
            streams.append(before)

    @contextmanager
    def graph(_: object) -> Iterator[None]:
        streams.append(SimpleNamespace())
        try:
            yield
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    for name, stand_in in {
        "CUDAGraph": object,
        "Stream": lambda: SimpleNamespace(wait_stream=lambda _: None),
        "current_stream": lambda: streams[-1],
        "synchronize": lambda: None,
        "stream": stream,
        "graph": graph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    with pytest.raises(RuntimeError, match="during capture"):
        capture([lambda: None])
    assert streams[-1] is usual


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_says_what_it_needs(warm_python: WarmPython) -> None:
    run = warm_python.run(["-c", "import runpy; runpy.run_module('kvscope_kernels.benchmark', run_name='__main__')"])
    assert run.returncode == 1
    assert run.stderr == "the kernel benchmark needs a CUDA device; torch finds none\n"


@pytest.mark.parametrize(
    ("mib", "memory", "share"), [(24_111, "24111MiB", "0.9"), (45_488, "24576MiB", "0.9"), (81_079, "24576MiB", "0.6")]
)
def test_script_asks_for_what_a_gpu_has(
    gpu_script: Callable[[int], list[str]], mib: int, memory: str, share: str
) -> None:
    """A card that is sold with 24 GB has 23.5 GiB, of which 0.6 would not hold the weights."""
    asked = [line for line in gpu_script(mib) if line.startswith("asked: ")]
    limited, speed, first_token, small = (line.partition("bench gpu ")[2] for line in asked)
    assert limited == f"--memory {memory} --no-eager --batch 1"
    assert speed == f"--gpu-memory-utilization {share} --with quantization=int4"
    assert first_token == f"--gpu-memory-utilization {share} --ttft"
    assert small.endswith("--shape 135m")


def test_script_leaves_out_what_a_gpu_has_no_room_for(gpu_script: Callable[[int], list[str]]) -> None:
    lines = gpu_script(16_376)
    (asked,) = (line for line in lines if line.startswith("asked: "))
    assert asked.endswith("--shape 135m")
    left_out = [line for line in lines if line.endswith("it needs a GPU with 20480 MiB, this one has 16376")]
    assert [line.split(" skipped")[0].strip() for line in left_out] == ["8B, 24 GiB", "8B, speed", "8B, first token"]


@pytest.fixture
def gpu_script(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int], list[str]]:
    """What tests/gpu.sh prints with a Python that finds a GPU of so many MiB, and tells what of `bench gpu` it is asked
    for."""
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\ncase "$*" in *mem_get_info*) echo "$MIB" ;; *"bench gpu"*) echo "asked: $*" ;; esac\n', "utf-8"
    )
    python.chmod(0o700)

    def lines(mib: int) -> list[str]:
        script = request.config.rootpath / "tests" / "gpu.sh"
        environment = {"PYTHON": str(python), "PATH": "/usr/bin:/bin", "MIB": str(mib)}
        run = subprocess.run([script], capture_output=True, text=True, env=environment)
        assert run.returncode == 0, run.stderr
        return run.stdout.splitlines()

    return lines


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_script_claims_no_pass_without_a_gpu(request: pytest.FixtureRequest) -> None:
    script = request.config.rootpath / "tests" / "gpu.sh"
    run = subprocess.run(
        [script], capture_output=True, text=True, env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"}
    )
    assert run.returncode == 0
    assert run.stdout == (
        "tests/gpu.sh needs a CUDA device and a torch built for it:"
        f" torch {torch.__version__} finds no CUDA device. Nothing was tested.\n"
    )
