"""Tables of tiles: whose entry counts, and what becomes of entries that no kernel could take."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvscope_kernels.launch import DotTiles, decode_tiles
from kvscope_kernels.tuning import tile_table
from kvscope_kernels.tuning.tile_table import (
    COMMITTED,
    DECODE,
    as_entry,
    describe_own_table,
    forcing,
    from_entry,
    own_table,
    read_table,
    table_key,
    tuned,
    write_table,
)

GIVEN = decode_tiles(128, 128, 4, 2)
OTHER = GIVEN._replace(tile_n=64, num_warps=8)
KEY = table_key(DECODE, GIVEN, 4, 2, is_quantized=False)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVSCOPE_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(name="A GPU"))
    start_segment()
    yield
    start_segment()


def start_segment() -> None:
    """As another start: what this process knew is forgotten."""
    tile_table._tiles_of.cache_clear()
    tile_table._gpu_name.cache_clear()


def found(device: str = "cuda:0") -> DotTiles:
    return tuned(DECODE, GIVEN, 4, 2, torch.device(device), is_quantized=False)


def test_what_was_measured_here_counts_and_on_this_gpu_alone() -> None:
    assert found() == GIVEN
    write_table(own_table(), "A GPU", {KEY: as_entry(OTHER)})
    assert found() == OTHER
    assert found("cpu") == GIVEN
    assert tuned(DECODE, GIVEN, 4, 4, torch.device("cuda:0"), is_quantized=False) == GIVEN, "another type of numbers"


def test_other_gpus_and_shapes_stay_in_the_table() -> None:
    write_table(own_table(), "Another", {KEY: as_entry(GIVEN)})
    write_table(own_table(), "A GPU", {"one": as_entry(GIVEN)})
    write_table(own_table(), "A GPU", {KEY: as_entry(OTHER)})
    assert read_table(own_table(), "Another").entries.keys() == {KEY}
    assert read_table(own_table(), "A GPU").entries.keys() == {"one", KEY}


def test_what_is_no_gain_any_more_is_taken_out() -> None:
    write_table(own_table(), "A GPU", {KEY: as_entry(OTHER), "one": as_entry(GIVEN)})
    write_table(own_table(), "A GPU", {KEY: None})
    assert read_table(own_table(), "A GPU").entries.keys() == {"one"}
    assert found() == GIVEN


BROKEN = {
    "": "no JSON",
    "{": "no JSON",
    "\x00\xff": "no JSON",
    "[]": "version None",
    '{"A GPU": {}}': "version None",
    '{"version": 0, "gpus": {}}': "version 0, these kernels read 1",
    '{"version": 1}': "something else in the place of tiles",
    '{"version": 1, "gpus": {"A GPU": 3}}': "something else in the place of tiles",
}


@pytest.mark.parametrize("text", BROKEN)
def test_a_table_that_cannot_be_read_is_none_and_said_in_a_line(text: str) -> None:
    own_table().write_text(text, "utf-8")
    assert found() == GIVEN
    words = describe_own_table(torch.device("cuda:0"))
    assert str(own_table()) in words
    assert BROKEN[text] in words
    assert "\n" not in words
    write_table(own_table(), "A GPU", {KEY: as_entry(OTHER)})
    assert found() == OTHER
    assert describe_own_table(torch.device("cuda:0")) == f"tiles of 1 shape as tuned on this GPU, from {own_table()}"


def test_nothing_is_said_where_there_is_no_table() -> None:
    assert describe_own_table(torch.device("cuda:0")) == ""
    write_table(own_table(), "Another", {KEY: as_entry(OTHER)})
    assert describe_own_table(torch.device("cuda:0")) == ""


WRONG: list[Any] = [
    None,
    7,
    {},
    as_entry(GIVEN) | {"tile_n": 48},
    as_entry(GIVEN) | {"tile_n": 1 << 20},
    as_entry(GIVEN) | {"tile_m": 16.0},
    as_entry(GIVEN) | {"num_warps": 3},
    as_entry(GIVEN) | {"num_warps": True},
    as_entry(GIVEN) | {"num_stages": 0},
    as_entry(GIVEN) | {"max_registers": 5000},
]


@pytest.mark.parametrize("entry", WRONG, ids=str)
def test_what_no_kernel_could_take_is_left_out(entry: Any) -> None:
    assert from_entry(entry, GIVEN, 4) is None


def test_a_tile_holds_the_heads_of_a_kv_head() -> None:
    assert from_entry(as_entry(GIVEN), GIVEN, 16) == GIVEN
    assert from_entry(as_entry(GIVEN), GIVEN, 17) is None


def test_the_table_that_comes_with_kvscope_is_right() -> None:
    table = json.loads(COMMITTED.read_text("utf-8"))["gpus"]
    assert set(table) == {"NVIDIA H100 80GB HBM3", "NVIDIA H200"}
    for entries in table.values():
        assert KEY in entries
        for key, entry in entries.items():
            assert from_entry(entry, GIVEN, 4) is not None, key


def test_forced_for_a_while() -> None:
    with forcing(DECODE, OTHER):
        assert found("cpu") == OTHER
    assert found("cpu") == GIVEN
