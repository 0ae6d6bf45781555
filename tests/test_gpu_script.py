"""`tests/gpu.sh`: what it requests of the GPU benchmark, and that it claims no pass without a GPU."""

import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvscope_engine.command_parser import CommandParser


@pytest.mark.parametrize(
    ("mib", "memory", "share"), [(24_111, "24111MiB", "0.9"), (45_488, "24576MiB", "0.9"), (81_079, "24576MiB", "0.6")]
)
def test_gpu_test_script_requests_benchmarks_that_fit_the_gpu_memory(
    gpu_script: Callable[[int], list[str]], mib: int, memory: str, share: str
) -> None:
    """A card that is sold with 24 GB has 23.5 GiB, of which 0.6 would not hold the weights."""
    asked = [line for line in gpu_script(mib) if line.startswith("asked: ")]
    limited, speed, first_token, small = (line.partition("bench gpu ")[2] for line in asked)
    assert limited == f"--memory {memory} --no-eager --batch 1"
    assert speed == f"--gpu-memory-utilization {share} --with quantization=int4"
    assert first_token == f"--gpu-memory-utilization {share} --ttft"
    assert small.endswith("--shape 135m")


def test_gpu_test_script_skips_benchmarks_that_do_not_fit_the_gpu_memory(
    gpu_script: Callable[[int], list[str]],
) -> None:
    lines = gpu_script(16_376)
    (asked,) = (line for line in lines if line.startswith("asked: "))
    assert asked.endswith("--shape 135m")
    left_out = [line for line in lines if line.endswith("it needs a GPU with 20480 MiB, this one has 16376")]
    assert [line.split(" skipped")[0].strip() for line in left_out] == ["8B, 24 GiB", "8B, speed", "8B, first token"]


@pytest.mark.parametrize("rehearsal", ["", "1"])
def test_script_requests_existing_benchmarks_and_tests(
    request: pytest.FixtureRequest, tmp_path: Path, rehearsal: str
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$*" in *mem_get_info*) echo 81079 ;; -m*) echo "asked: $*" ;; esac\n', "utf-8")
    python.chmod(0o700)
    environment = {"PYTHON": str(python), "PATH": "/usr/bin:/bin", "KVSCOPE_GPU_REHEARSAL": rehearsal}
    root = request.config.rootpath
    run = subprocess.run([root / "tests" / "gpu.sh"], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    asked = [line.split()[2:] for line in run.stdout.splitlines() if line.startswith("asked: -m ")]
    benchmarks = [words[2:] for words in asked if words[:2] == ["kvscope_engine.cli.main", "bench"]]
    assert {words[0] for words in benchmarks} == ({"kernels", "memory"} if rehearsal else {"kernels", "memory", "gpu"})
    for name, *options in benchmarks:
        parser = CommandParser()
        importlib.import_module(f"kvscope_engine.bench.{name}").add_arguments(parser)
        parser.parse_args(options)
    paths = [word for words in asked if words[0] == "pytest" for word in words if word.startswith("tests/")]
    assert len(paths) > 6
    assert not [path for path in paths if not (root / path).exists()]


@pytest.fixture
def gpu_script(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int], list[str]]:
    """Function that returns the output of tests/gpu.sh with a fake Python that finds a GPU of this size and prints the
    requested `bench gpu` commands: `gpu_script(mib)`.
    """
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
