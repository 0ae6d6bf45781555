"""`bench kernels --tune` from the first tile to the engine's next start, with a GPU and a clock that are made up."""

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
from kvscope_kernels.tuning.tile_table import DECODE, describe_own_table, own_table, tuned
from kvscope_telemetry.errors import BadInput

GPU = torch.device("cuda:0")
GIVEN = decode_tiles(128, 128, 4, 2)


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Whose decode takes less time the larger the tile of tokens is, and whose prefill takes the same in all tiles."""

    def decode(args: AttentionArgs, *_: Any) -> torch.Tensor:
        if taken().num_warps == 8:
            raise RuntimeError("out of resource: shared memory")
        return args.made_out().fill_(1.0)

    def small(work: AttentionWorkload, device: str) -> list[Pool]:
        lens = None if work.query_lens is None else (2,)
        return [make_pool(replace(work, seq_lens=(20,), query_lens=lens), "cpu")]

    def sampler(device: str, contender: CallCycle) -> Callable[[], float]:
        is_decode = contender.calls[0].func is decode  # type: ignore[attr-defined]
        return lambda: 1e-3 / taken().tile_n if is_decode else 1e-3

    monkeypatch.setenv("KVSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(name="A GPU"))
    ops = SimpleNamespace(decode=decode, prefill=lambda args, runs: args.made_out().fill_(1.0))
    monkeypatch.setattr(kvscope_kernels, "ops_for", lambda _: ops)
    monkeypatch.setattr(calls, "pools_of", small)
    monkeypatch.setattr(samplers, "sampler_on", sampler)
    restart_process()
    yield
    restart_process()


def restart_process() -> None:
    """As another start: what this process knew is forgotten."""
    tile_table._tiles_of.cache_clear()
    tile_table._gpu_name.cache_clear()


def taken(device: str = "cpu") -> DotTiles:
    return tuned(DECODE, GIVEN, 4, 2, torch.device(device), is_quantized=False)


def options(**changes: Any) -> Namespace:
    return Namespace(**({"only": ["decode"], "table": None, "json": False} | changes))


def test_what_was_found_is_what_the_next_start_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert describe_own_table(GPU) == ""
    heard: list[str] = []
    seconds = count()
    assert tune("cuda", options(), heard.append, lambda: float(next(seconds))) == 0
    restart_process()
    assert taken("cuda:0").tile_n == 128
    assert taken("cuda:0").num_warps != 8, "what does not run is not taken"
    assert describe_own_table(GPU) == f"tiles of 8 shapes as tuned on this GPU, from {own_table()}"
    assert heard[0] == "shape 1 of 8, paged_decode 32/8/128, tile 1 of 48"
    assert heard[-1].startswith("shape 8 of 8, paged_decode 64/8/64, tile 4")
    assert heard[-1].endswith(", about 1 min left")
    said = capsys.readouterr().out
    assert "8 of 8 shapes gained more than 3 %" in said
    assert f"in {own_table()}, which engines read at their start. To undo it, delete that file." in said
    own_table().unlink()
    restart_process()
    assert taken("cuda:0") == GIVEN
    assert describe_own_table(GPU) == ""


def test_no_gain_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune("cuda", options(only=["prefill"]), lambda _: None) == 0
    said = capsys.readouterr().out
    assert "0 of 16 shapes gained more than 3 %" in said
    assert "Engines go on with the tiles that they had." in said
    assert "split" in said, "short turns behind long contexts are shapes of their own"
    assert describe_own_table(GPU) == ""


def test_what_was_found_before_it_was_stopped_stays() -> None:
    def stop(words: str) -> None:
        if words.startswith("shape 3"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune("cuda", options(), stop)
    restart_process()
    assert describe_own_table(GPU).startswith("tiles of 2 shapes")


def test_another_file_is_written_where_it_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune("cuda", options(table=str(tmp_path / "x.json"), json=True), lambda _: None) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["table"] == str(tmp_path / "x.json")
    assert len(json.loads((tmp_path / "x.json").read_text("utf-8"))["gpus"]["A GPU"]) == len(report["kept"]) == 8
    assert not own_table().exists()


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", "utf-8")
    with pytest.raises(BadInput, match="cannot be written: "):
        tune("cuda", options(table=str(tmp_path / "file" / "x.json")), lambda _: None)
