"""`bench kernels` from end to end on a CPU, and its table, without claims about speed."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import torch

from kvscope_engine.bench.kernels import command
from kvscope_engine.bench.kernels.contest import OURS
from kvscope_engine.bench.kernels.report import HEADER, text
from kvscope_engine.cli.main import main

SHORT = ["bench", "kernels", "--device", "cpu", "--dtype", "float32", "--only", "forms", "--rounds", "1"]


def test_kernel_benchmark_report_has_times_device_and_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert report["on"] == "cpu"
    assert report["dtype"] == "float32"
    assert {"date", "device", "driver", "threads", "rounds"} <= report.keys()
    assert "torch" in report["versions"]
    assert report["read_gb_per_s"] > 0
    assert [row["kernel"] for row in report["rows"]] == ["allow tokens"]
    assert all(row["time_us"] > 0 and row["share_of_read"] > 0 for row in report["rows"])
    printed = text(report)
    assert all(word in printed for word in HEADER)
    assert "skipped: torch reference: is ours on this device (1 case, first allow tokens 8 requests)" in printed


def test_bench_kernels_command_offers_every_kernel_that_has_a_comparison() -> None:
    from kvscope_engine.bench.kernels.contests import KERNELS

    assert tuple(KERNELS) == command.KERNELS


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rounds", "0"], "--rounds 0 is not accepted"),
        (["--num-threads", "0"], "--num-threads 0 is not accepted"),
        (["--table", "x.json"], "--table goes with --tune"),
        (["--only", "sampling"], "invalid choice: 'sampling'"),
    ],
)
def test_kernel_benchmark_names_an_invalid_option(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SHORT[:4], *options]) == 2
    assert said in capsys.readouterr().err


def test_tuning_without_a_gpu_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels", "--device", "cpu", "--tune"]) == 2
    said = capsys.readouterr().err
    assert "--tune needs a CUDA device" in said
    assert said.count("\n") == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.gpu
def test_decode_on_a_gpu_is_compared_with_a_plain_read() -> None:
    from kvscope_engine.bench.kernels.contest import measured
    from kvscope_engine.bench.kernels.contests import decode
    from kvscope_engine.bench.kernels.samplers import read_sampler, sampler_on, wait_for
    from kvscope_kernels import ops_for
    from kvscope_kernels.attention_workload import AttentionWorkload

    work = AttentionWorkload(name="8 x 4k", seq_lens=(4096,) * 8)
    (contest,) = decode(ops_for("cuda"), "cuda", torch.bfloat16, [work])
    result = measured(contest, partial(sampler_on, "cuda"), read_sampler("cuda"), 9, partial(wait_for, "cuda"))
    ours = result.rows[0]
    assert ours.contender == OURS
    assert 0.05 < ours.share_of_read < 2
