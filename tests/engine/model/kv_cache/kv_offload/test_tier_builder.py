"""Sizes of the tiers, and what is refused before any memory is taken."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvscope_engine.model.kv_cache.kv_offload.block_mover import BlockMover
from kvscope_engine.model.kv_cache.kv_offload.tier_builder import make_tier_mover
from kvscope_engine.model.kv_cache.kv_storage import KVStorage
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.errors import BadInput


def test_no_host_memory_means_no_tiers(storage: KVStorage) -> None:
    assert make_tier_mover(EngineConfig(), storage, "") is None


def test_host_and_disk_tiers_have_as_many_slots_as_fit_their_size(make_mover: Callable[..., BlockMover]) -> None:
    mover = make_mover(7, 5)
    assert (mover.num_host_slots, mover.num_disk_slots) == (7, 5)
    assert mover.note == ""


@pytest.mark.parametrize(
    ("host", "disk", "option"), [(1279, 0, "--kv-host-memory 1279"), (1280, 4095, "--kv-disk 4095")]
)
def test_tier_smaller_than_a_block_is_refused(
    storage: KVStorage, own_cache: Path, open_fds: Callable[[], int], host: int, disk: int, option: str
) -> None:
    before = open_fds()
    config = EngineConfig(host_kv_memory_bytes=host, disk_kv_memory_bytes=disk)
    with pytest.raises(BadInput, match=f"{option} is not accepted: one block takes"):
        make_tier_mover(config, storage, "")
    assert open_fds() == before


def test_host_tier_larger_than_free_memory_is_refused(storage: KVStorage) -> None:
    with pytest.raises(BadInput, match=r"--kv-host-memory asks for 1073741824 MiB of host memory: \d+ MiB are free"):
        make_tier_mover(EngineConfig(host_kv_memory_bytes=1 << 50), storage, "")


def test_disk_tier_larger_than_free_space_is_refused(storage: KVStorage, tmp_path: Path) -> None:
    path = tmp_path / "kv"
    config = EngineConfig(host_kv_memory_bytes=1 << 20, disk_kv_memory_bytes=1 << 50, disk_kv_path=str(path))
    with pytest.raises(BadInput, match=r"--kv-disk asks for 1073741824 MiB in '.*kv': \d+ MiB are free"):
        make_tier_mover(config, storage, "")
    assert not path.exists(), "a new file was left behind"


def test_disk_tier_beyond_the_file_size_limit_is_refused(storage: KVStorage, own_cache: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, hard))
    try:
        with pytest.raises(
            BadInput, match=r"--kv-disk asks for 5 MiB in a temporary file in .*: the limit on file sizes is 4 MiB"
        ):
            make_tier_mover(EngineConfig(host_kv_memory_bytes=1 << 20, disk_kv_memory_bytes=5 << 20), storage, "")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


KILLED = """
import os, signal, sys
import torch
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_engine.model.kv_cache.kv_storage import KVStorage, LayerShape
from kvscope_engine.model.kv_cache.kv_offload.tier_builder import make_tier_mover
storage = KVStorage(4, 4, [LayerShape(1, 8)], torch.float32, torch.device("cpu"))
for path in (None, sys.argv[1]):
    config = EngineConfig(host_kv_memory_bytes=4096, disk_kv_memory_bytes=1 << 20, disk_kv_path=path)
    mover = make_tier_mover(config, storage, "")
    mover.offload([0], [0], [None])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_engine_leaves_no_file(own_cache: Path, tmp_path: Path) -> None:
    own_cache.mkdir()
    arguments = [sys.executable, "-c", KILLED, str(own_cache / "named")]
    ended = subprocess.run(arguments, env=os.environ | {"KVSCOPE_CACHE": str(own_cache)}, check=False)
    assert ended.returncode == -9
    assert list(own_cache.iterdir()) == []
