"""Tables of tiles: which entry is used, and that invalid entries are left out."""

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
    DECODE,
    SHIPPED_TABLE,
    as_entry,
    describe_user_table,
    forced_tiles,
    from_entry,
    measured_tiles,
    read_table,
    table_key,
    user_table_path,
    write_table,
)

GIVEN = decode_tiles(128, 128, 4, 2)
OTHER = GIVEN._replace(tile_n=64, num_warps=8)
KEY = table_key(DECODE, GIVEN, 4, 2, is_quantized=False)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVSCOPE_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(name="A GPU"))
    clear_caches()
    yield
    clear_caches()


def clear_caches() -> None:
    """Clear the caches of measured tiles, as a restart would."""
    tile_table._tiles_of.cache_clear()
    tile_table._gpu_name.cache_clear()


def tuned_tiles(device: str = "cuda:0") -> DotTiles:
    return measured_tiles(DECODE, GIVEN, 4, 2, torch.device(device), is_quantized=False)


def test_tuned_tile_sizes_are_used_only_on_the_gpu_they_were_measured_on() -> None:
    assert tuned_tiles() == GIVEN
    write_table(user_table_path(), "A GPU", {KEY: as_entry(OTHER)})
    assert tuned_tiles() == OTHER
    assert tuned_tiles("cpu") == GIVEN
    assert measured_tiles(DECODE, GIVEN, 4, 4, torch.device("cuda:0"), is_quantized=False) == GIVEN, (
        "the entry was used for another dtype"
    )


def test_writing_tuned_tiles_keeps_entries_of_other_gpus_and_shapes() -> None:
    write_table(user_table_path(), "Another", {KEY: as_entry(GIVEN)})
    write_table(user_table_path(), "A GPU", {"one": as_entry(GIVEN)})
    write_table(user_table_path(), "A GPU", {KEY: as_entry(OTHER)})
    assert read_table(user_table_path(), "Another").entries.keys() == {KEY}
    assert read_table(user_table_path(), "A GPU").entries.keys() == {"one", KEY}


def test_tuned_tile_entry_without_a_gain_is_removed_from_the_table() -> None:
    write_table(user_table_path(), "A GPU", {KEY: as_entry(OTHER), "one": as_entry(GIVEN)})
    write_table(user_table_path(), "A GPU", {KEY: None})
    assert read_table(user_table_path(), "A GPU").entries.keys() == {"one"}
    assert tuned_tiles() == GIVEN


BROKEN = {
    "": "not JSON",
    "{": "not JSON",
    "\x00\xff": "not JSON",
    "[]": "version None",
    '{"A GPU": {}}': "version None",
    '{"version": 0, "gpus": {}}': "version 0, these kernels read 1",
    '{"version": 1}': "list of tiles is not a JSON object",
    '{"version": 1, "gpus": {"A GPU": 3}}': "list of tiles is not a JSON object",
}


@pytest.mark.parametrize("text", BROKEN)
def test_unreadable_tile_table_is_ignored_and_reported_in_one_line(text: str) -> None:
    user_table_path().write_text(text, "utf-8")
    assert tuned_tiles() == GIVEN
    words = describe_user_table(torch.device("cuda:0"))
    assert str(user_table_path()) in words
    assert BROKEN[text] in words
    assert "\n" not in words
    write_table(user_table_path(), "A GPU", {KEY: as_entry(OTHER)})
    assert tuned_tiles() == OTHER
    assert (
        describe_user_table(torch.device("cuda:0"))
        == f"tiles of 1 shape as tuned on this GPU, from {user_table_path()}"
    )


def test_missing_tile_table_is_not_reported() -> None:
    assert describe_user_table(torch.device("cuda:0")) == ""
    write_table(user_table_path(), "Another", {KEY: as_entry(OTHER)})
    assert describe_user_table(torch.device("cuda:0")) == ""


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
def test_invalid_tile_table_entry_is_ignored(entry: Any) -> None:
    assert from_entry(entry, GIVEN, 4) is None


def test_tile_must_hold_the_heads_of_a_kv_head() -> None:
    assert from_entry(as_entry(GIVEN), GIVEN, 16) == GIVEN
    assert from_entry(as_entry(GIVEN), GIVEN, 17) is None


def test_tile_table_shipped_with_kvscope_is_valid() -> None:
    table = json.loads(SHIPPED_TABLE.read_text("utf-8"))["gpus"]
    assert set(table) == {"NVIDIA H100 80GB HBM3", "NVIDIA H200"}
    for entries in table.values():
        assert KEY in entries
        for key, entry in entries.items():
            assert from_entry(entry, GIVEN, 4) is not None, key


def test_forced_tiles_apply_only_in_their_context() -> None:
    with forced_tiles(DECODE, OTHER):
        assert tuned_tiles("cpu") == OTHER
    assert tuned_tiles("cpu") == GIVEN
