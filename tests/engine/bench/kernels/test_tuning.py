"""`bench kernels --tune` from the first tile to the next engine start, with a fake GPU and clock."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kvscope_kernels
from kvscope_engine.bench.kernels import calls, samplers
from kvscope_engine.bench.kernels.contest import CallCycle
from kvscope_engine.bench.kernels.tuning import tune
from kvscope_kernels.attention_args import AttentionArgs
from kvscope_kernels.attention_workload import AttentionWorkload, Pool, make_pool
from kvscope_kernels.launch import DotTiles, decode_tiles
from kvscope_kernels.tuning import tile_table
from kvscope_kernels.tuning.tile_table import DECODE, describe_user_table, measured_tiles, user_table_path
from kvscope_telemetry.errors import BadInput

GPU = torch.device("cuda:0")
GIVEN = decode_tiles(128, 128, 4, 2)


@pytest.fixture(autouse=True)
def fake_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A fake GPU whose decode gets faster with larger tiles, and whose prefill takes the same time with all tiles."""

    def decode(args: AttentionArgs, *_: Any) -> torch.Tensor:
        if tuned_tiles().num_warps == 8:
            raise RuntimeError("out of resource: shared memory")
        return args.out_or_new().fill_(1.0)

    def small(work: AttentionWorkload, device: str) -> list[Pool]:
        lens = None if work.query_lens is None else (2,)
        return [make_pool(replace(work, seq_lens=(20,), query_lens=lens), "cpu")]

    def sampler(device: str, contender: CallCycle) -> Callable[[], float]:
        is_decode = contender.calls[0].func is decode  # type: ignore[attr-defined]
        return lambda: 1e-3 / tuned_tiles().tile_n if is_decode else 1e-3

    monkeypatch.setenv("KVSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(name="A GPU"))
    ops = SimpleNamespace(decode=decode, prefill=lambda args, runs: args.out_or_new().fill_(1.0))
    monkeypatch.setattr(kvscope_kernels, "ops_for", lambda _: ops)
    monkeypatch.setattr(calls, "pools_of", small)
    monkeypatch.setattr(samplers, "sampler_on", sampler)
    clear_caches()
    yield
    clear_caches()


def clear_caches() -> None:
    """Clear the caches of measured tiles, as a restart would."""
    tile_table._tiles_of.cache_clear()
    tile_table._gpu_name.cache_clear()


def tuned_tiles(device: str = "cpu") -> DotTiles:
    return measured_tiles(DECODE, GIVEN, 4, 2, torch.device(device), is_quantized=False)


def options(**changes: Any) -> Namespace:
    return Namespace(**({"only": ["decode"], "table": None, "json": False} | changes))


def test_tuned_tiles_are_used_at_the_next_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert describe_user_table(GPU) == ""
    heard: list[str] = []
    seconds = count()
    assert tune("cuda", options(), heard.append, lambda: float(next(seconds))) == 0
    clear_caches()
    assert tuned_tiles("cuda:0").tile_n == 128
    assert tuned_tiles("cuda:0").num_warps != 8, "what does not run is not taken"
    assert describe_user_table(GPU) == f"tiles of 8 shapes as tuned on this GPU, from {user_table_path()}"
    assert heard[0] == "shape 1 of 8, paged_decode 32/8/128, tile 1 of 48"
    assert heard[-1].startswith("shape 8 of 8, paged_decode 64/8/64, tile 4")
    assert heard[-1].endswith(", about 1 min left")
    said = capsys.readouterr().out
    assert "8 of 8 shapes gained more than 3 %" in said
    assert f"in {user_table_path()}, which engines read at their start. To undo it, delete that file." in said
    user_table_path().unlink()
    clear_caches()
    assert tuned_tiles("cuda:0") == GIVEN
    assert describe_user_table(GPU) == ""


def test_tuning_without_a_gain_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune("cuda", options(only=["prefill"]), lambda _: None) == 0
    said = capsys.readouterr().out
    assert "0 of 16 shapes gained more than 3 %" in said
    assert "Engines continue to use the same tile sizes." in said
    assert "split" in said, "short chunks after long contexts are separate shapes"
    assert describe_user_table(GPU) == ""


def test_interrupted_tuning_keeps_finished_shapes() -> None:
    def stop(words: str) -> None:
        if words.startswith("shape 3"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune("cuda", options(), stop)
    clear_caches()
    assert describe_user_table(GPU).startswith("tiles of 2 shapes")


def test_tuning_writes_to_the_given_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune("cuda", options(table=str(tmp_path / "x.json"), json=True), lambda _: None) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["table"] == str(tmp_path / "x.json")
    assert len(json.loads((tmp_path / "x.json").read_text("utf-8"))["gpus"]["A GPU"]) == len(report["kept"]) == 8
    assert not user_table_path().exists()


def test_unwritable_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", "utf-8")
    with pytest.raises(BadInput, match="cannot be written: "):
        tune("cuda", options(table=str(tmp_path / "file" / "x.json")), lambda _: None)
