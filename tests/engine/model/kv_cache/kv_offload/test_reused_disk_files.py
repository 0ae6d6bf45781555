"""A kept file is reused at the next start if it is complete and from the same model."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import examples

from kvscope_engine.model.kv_cache.kv_offload.block_mover import BlockMover
from kvscope_engine.model.kv_cache.kv_offload.disk_index import (
    DiskIndex,
    IndexedBlock,
    IndexRequirements,
    read_index,
    write_index,
)
from kvscope_engine.model.kv_cache.kv_storage import KVStorage
from kvscope_engine.policy.prefixes.prefix_index import Prefix
from kvscope_telemetry.errors import BadInput

MakeMover = Callable[..., BlockMover]
Contents = Callable[[Sequence[int]], list[bytes]]
NumberedPrefix = Callable[[int], Prefix]


@pytest.fixture
def kept(make_mover: MakeMover, prefix: NumberedPrefix, tmp_path: Path) -> Path:
    """A kept file whose slots 0, 2 and 3 hold the prefix blocks 0, 2 and 3; slot 1 belongs to a request."""
    mover = make_mover(4, 6, tmp_path / "kv", keep=True)
    mover.save(range(4), range(4))
    assert all(mover.offload(range(4), range(4), [prefix(0), None, prefix(2), prefix(3)]))
    assert mover.close() == ""
    return tmp_path / "kv"


def test_cached_prefixes_in_a_kept_disk_file_are_loaded_at_the_next_start(
    make_mover: MakeMover,
    kept: Path,
    prefix: NumberedPrefix,
    contents: Contents,
    random_blocks: Callable[..., KVStorage],
    tools: Any,
) -> None:
    others = random_blocks(seed=9)
    mover = make_mover(4, 6, kept, keep=True, storage=others)
    assert dict(mover.recovered()) == {slot: prefix(slot) for slot in (0, 2, 3)}
    assert mover.note == ""
    assert mover.load_from_disk([0, 1, 2, 3], [0, 1, 2, 3]) == [True, False, True, True]
    mover.load([0, 2, 3], [7, 8, 9])
    mover.flush()
    assert [tools.content(others, block) for block in (7, 8, 9)] == contents([0, 2, 3])


def test_hash_salt_of_a_kept_disk_file_is_the_same_at_the_next_start(
    make_mover: MakeMover, kept: Path, tmp_path: Path
) -> None:
    first = make_mover(4, 6, kept, keep=True)
    salt = first.salt
    first.close()
    assert salt is not None
    assert make_mover(4, 6, kept, keep=True).salt == salt
    assert make_mover(4, 6, tmp_path / "other", keep=True).salt != salt


def test_kept_prefixes_follow_later_offloads(make_mover: MakeMover, kept: Path, prefix: NumberedPrefix) -> None:
    mover = make_mover(4, 6, kept, keep=True)
    mover.save(range(4), range(4))
    assert all(mover.offload([0, 1, 2], [0, 4, 5], [None, prefix(2), prefix(8)]))
    mover.close()
    assert dict(make_mover(4, 6, kept, keep=True).recovered()) == {3: prefix(3), 4: prefix(2), 5: prefix(8)}


def test_forgotten_prefixes_are_not_kept(make_mover: MakeMover, kept: Path, prefix: NumberedPrefix) -> None:
    mover = make_mover(4, 6, kept, keep=True)
    mover.forget_prefixes()
    mover.save([5], [0])
    assert mover.offload([0], [1], [prefix(5)]) == [True]
    assert mover.close() == ""
    assert make_mover(4, 6, kept, keep=True).recovered() == [(1, prefix(5))]


def test_smaller_tier_keeps_the_prefixes_that_fit(make_mover: MakeMover, kept: Path, prefix: NumberedPrefix) -> None:
    mover = make_mover(4, 3, kept, keep=True)
    assert dict(mover.recovered()) == {0: prefix(0), 2: prefix(2)}
    assert all(mover.load_from_disk([0, 2], [0, 1]))


def test_file_of_another_model_is_not_reused(make_mover: MakeMover, kept: Path) -> None:
    mover = make_mover(4, 6, kept, keep=True, fingerprint="other")
    assert mover.recovered() == []
    assert mover.note == f"{str(kept)!r} is used anew: its index is of another model or layout"
    assert mover.load_from_disk([0], [0]) == [False]


def test_file_of_a_crashed_engine_is_not_reused_but_usable(make_mover: MakeMover, kept: Path) -> None:
    mover = make_mover(4, 6, kept, keep=True)
    index = Path(f"{kept}.index").read_bytes()
    mover.close()
    Path(f"{kept}.index").write_bytes(index)  # the state while the engine was running
    assert make_mover(4, 6, kept, keep=True).recovered() == []


def test_file_in_use_is_refused(make_mover: MakeMover, kept: Path) -> None:
    make_mover(4, 6, kept, keep=True)
    for keep in (True, False):
        with pytest.raises(BadInput, match="in use by another engine"):
            make_mover(4, 6, kept, keep=keep)


def test_changed_record_is_lost_and_the_others_are_used(make_mover: MakeMover, kept: Path) -> None:
    raw = bytearray(kept.read_bytes())
    raw[2 * 4096] ^= 0x80
    kept.write_bytes(raw)
    mover = make_mover(4, 6, kept, keep=True)
    assert mover.load_from_disk([0, 2, 3], [0, 1, 2]) == [True, False, True]
    assert (mover.has_disk, mover.stats.num_lost) == (True, 1)


def test_file_of_another_size_is_not_reused(make_mover: MakeMover, kept: Path) -> None:
    os.truncate(kept, 4096)
    mover = make_mover(4, 6, kept, keep=True)
    assert mover.recovered() == []
    assert "its index is for a file of 24576 bytes, not 4096" in mover.note


def test_disk_tier_whose_file_was_removed_keeps_no_file(
    make_mover: MakeMover, kept: Path, prefix: NumberedPrefix
) -> None:
    mover = make_mover(4, 6, kept, keep=True)
    kept.unlink()
    mover.offload([0], [0], [prefix(0)])
    assert "is not kept" in mover.close()
    assert not kept.exists()


def test_kept_file_is_removed_without_the_option(make_mover: MakeMover, kept: Path) -> None:
    mover = make_mover(4, 6, kept)
    assert mover.recovered() == []
    assert list(kept.parent.glob("kv*")) == []


EXPECTED = IndexRequirements("model", 4, 10)


def an_index(*blocks: IndexedBlock) -> DiskIndex:
    return DiskIndex("model", b"s" * 32, 100, list(blocks))


def a_block(**changes: object) -> IndexedBlock:
    fields: dict[str, object] = {
        "slot": 1,
        "checksum": 5,
        "digest": b"d" * 32,
        "start": 8,
        "tokens": b"t" * 16,
        "parent": b"p" * 32,
    }
    return IndexedBlock(**(fields | changes))  # type: ignore[arg-type]


def test_disk_tier_index_is_read_back_as_written_with_private_permissions(tmp_path: Path) -> None:
    index = an_index(a_block(), a_block(slot=2, digest=b"e" * 32, start=0, parent=b""))
    write_index(tmp_path / "index", index)
    assert read_index(tmp_path / "index", EXPECTED, 100) == (index, "")
    assert [path.name for path in tmp_path.iterdir()] == ["index"]
    assert (tmp_path / "index").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "blocks",
    [
        [a_block(slot=-1)],
        [a_block(checksum=1 << 32)],
        [a_block(checksum=-1)],
        [a_block(digest=b"short")],
        [a_block(tokens=b"t" * 15)],
        [a_block(start=-4)],
        [a_block(start=3)],
        [a_block(start=1 << 40)],
        [a_block(), a_block(digest=b"e" * 32)],
        [a_block(), a_block(slot=2)],
    ],
)
def test_numbers_in_an_index_are_bounded(tmp_path: Path, blocks: list[IndexedBlock]) -> None:
    write_index(tmp_path / "index", an_index(*blocks))
    assert read_index(tmp_path / "index", EXPECTED, 100) == (None, "is damaged")


def test_oversized_index_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / "index", "wb") as file:
        file.truncate(1 << 40)
    found, reason = read_index(tmp_path / "index", EXPECTED, 100)
    assert found is None
    assert reason.startswith("is larger than ")


@settings(max_examples=examples(60))
@given(at=st.integers(0, 10_000), flip=st.integers(1, 255), cut=st.booleans())
def test_damaged_index_is_refused_without_an_exception(tmp_path: Path, at: int, flip: int, cut: bool) -> None:
    write_index(tmp_path / "index", an_index(a_block(digest=secrets.token_bytes(32))))
    raw = bytearray((tmp_path / "index").read_bytes())
    at %= len(raw)
    if cut:
        del raw[at:]
    else:
        raw[at] ^= flip
    (tmp_path / "index").write_bytes(raw)
    assert read_index(tmp_path / "index", EXPECTED, 100) == (None, "is damaged")


def test_folder_in_place_of_the_index_is_refused(make_mover: MakeMover, tmp_path: Path) -> None:
    (tmp_path / "kv.index").mkdir()
    with pytest.raises(BadInput, match=r"cannot write '.*kv\.index'"):
        make_mover(4, 6, tmp_path / "kv", keep=True)
