"""Measure how much memory the lower tiers of the KV cache take, and how fast blocks are copied through them.

Host memory: kvscope's exact allocation is compared with torch's pinned allocator, which rounds up to powers of two (on
a machine without CUDA, torch's value is computed and marked as such). Rates: blocks of a small model are copied from
the pool to host memory, to disk, and back; and checksums are computed. The table has medians of the rounds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import time
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from kvscope_engine.text_table import table
from kvscope_telemetry.errors import BadInput

if TYPE_CHECKING:
    from kvscope_engine.model.kv_cache.kv_storage import KVStorage

MIB: Final = 1 << 20
SLAB_MIB: Final = (100, 1100, 9 * 1024, 33 * 1024)
"""Sizes in MiB of host memory to request. All but the first are slightly above a power of two, so that torch's
pinned allocator takes almost twice as much.
"""
MAX_MEASURED_MIB: Final = 2048
"""Maximum size in MiB that is really allocated with torch's pinned allocator. For larger sizes its use is computed."""
NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 30, 3, 64, 16
"""Shape of the default model's blocks: 360 KiB in bfloat16."""
CHECKSUMS: Final[dict[str, Callable[[bytes], object]]] = {
    "crc32": zlib.crc32,
    "blake2b": lambda data: hashlib.blake2b(data, digest_size=8).digest(),
    "sha256": lambda data: hashlib.sha256(data).digest(),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="rounds (default: 5)")
    parser.add_argument("--mib", type=int, default=64, metavar="N", help="MiB of blocks to move (default: 64)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="device of the pool")
    parser.add_argument(
        "--disk-path", metavar="FILE", help="a folder on the drive to measure (default: the cache folder)"
    )


def run(args: argparse.Namespace) -> int:
    if args.repeats < 1 or args.mib < 1:
        raise BadInput(f"--repeats {args.repeats} --mib {args.mib} is not accepted: must be at least 1 each")
    report: dict[str, Any] = {
        "load_average": os.getloadavg()[0],
        "host_memory": [_slab(mib * MIB) for mib in SLAB_MIB],
        "moves": _moves(args),
        "checksums_gb_per_s": {name: _checksum_rate(function, args.repeats) for name, function in CHECKSUMS.items()},
    }
    print(json.dumps(report) if args.json else _text(report))
    return 0


def _slab(num_bytes: int) -> dict[str, Any]:
    from kvscope_engine.model.device_memory.host_slab import (
        exact_bytes,
        measured_torch_pinned_bytes,
        torch_pinned_bytes,
    )

    measured = measured_torch_pinned_bytes(num_bytes) if num_bytes <= MAX_MEASURED_MIB * MIB else None
    return {
        "asked_bytes": num_bytes,
        "exact_bytes": exact_bytes(num_bytes),
        "torch_pinned_bytes": torch_pinned_bytes(num_bytes) if measured is None else measured,
        "torch_is_measured": measured is not None,
    }


def _moves(args: argparse.Namespace) -> dict[str, Any]:
    from kvscope_engine.model.kv_cache.kv_offload.disk_records import record_bytes
    from kvscope_engine.model.kv_cache.kv_offload.tier_builder import make_tier_mover
    from kvscope_telemetry.engine_config import EngineConfig

    storage = _storage(args)
    config = EngineConfig(
        host_kv_memory_bytes=storage.num_bytes,
        disk_kv_memory_bytes=storage.num_blocks * record_bytes(storage.block_bytes),
        disk_kv_path=args.disk_path,
    )
    mover = make_tier_mover(config, storage, "bench")
    assert mover is not None, "a host tier was asked for"
    try:
        rounds = [_round(mover, storage) for _ in range(args.repeats)]
        stats = mover.stats
        return {
            "block_bytes": storage.block_bytes,
            "num_blocks": storage.num_blocks,
            "gb_per_s": {way: statistics.median(seconds[way] for seconds in rounds) for way in rounds[0]},
            "swap_seconds_per_block": mover.swap_seconds(1),
            "host_is_pinned": stats.host_is_pinned,
            "disk_is_direct": stats.disk_is_direct,
        }
    finally:
        mover.close()


def _storage(args: argparse.Namespace) -> KVStorage:
    import torch

    from kvscope_engine.model.kv_cache.kv_storage import KVStorage, LayerShape, block_bytes
    from kvscope_engine.model.platforms.device import choose_device

    layers = [LayerShape(NUM_KV_HEADS, HEAD_DIM)] * NUM_LAYERS
    num_blocks = max(1, args.mib * MIB // block_bytes(layers, BLOCK_SIZE, torch.bfloat16))
    storage = KVStorage(num_blocks, BLOCK_SIZE, layers, torch.bfloat16, choose_device(args.device))
    for tensor in storage.block_tensors:
        tensor.normal_()
    return storage


def _round(mover: Any, storage: KVStorage) -> dict[str, float]:
    """Return the GB/s of copying all blocks in each direction.

    The slots used in the lower tier are non-contiguous, as after some use.
    """
    ids = list(range(storage.num_blocks))
    slots = ids[::2] + ids[1::2]
    no_prefixes = [None] * len(ids)
    steps: dict[str, Callable[[], object]] = {
        "to host": lambda: _synchronize(mover.save(ids, slots), mover, storage),
        "from host": lambda: _synchronize(mover.load(slots, ids), mover, storage),
        "to disk, queued": lambda: mover.offload(ids, ids, no_prefixes),
        "to disk, written": lambda: mover.drain(),
        "from disk": lambda: mover.load_from_disk(ids, ids),
    }
    seconds = {way: _seconds(step) for way, step in steps.items()}
    seconds["to disk, written"] += seconds["to disk, queued"]
    return {way: storage.num_bytes / 1e9 / spent for way, spent in seconds.items()}


def _synchronize(_: None, mover: Any, storage: KVStorage) -> None:
    mover.flush()
    if storage.device.type == "cuda":
        import torch

        torch.cuda.synchronize(storage.device)


def _seconds(step: Callable[[], object]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def _checksum_rate(function: Callable[[bytes], object], repeats: int) -> float:
    data = os.urandom(4 * MIB)
    return len(data) / 1e9 / statistics.median(_seconds(lambda: function(data)) for _ in range(repeats))


def _text(report: dict[str, Any]) -> str:
    moves = report["moves"]
    disk_mode = "direct I/O" if moves["disk_is_direct"] else "through the page cache"
    memory = "pinned" if moves["host_is_pinned"] else "not pinned"
    blocks = f"{moves['num_blocks']} blocks of {moves['block_bytes'] / 1024:.0f} KiB"
    heading = f"{blocks}; host memory {memory}; disk: {disk_mode}"
    rates = [[way, f"{rate:.2f}"] for way, rate in moves["gb_per_s"].items()]
    sums = [[name, f"{rate:.2f}"] for name, rate in report["checksums_gb_per_s"].items()]
    return "\n\n".join(
        (
            table(["host memory, MiB asked", "exact slab", "torch pinned", "torch's figure"], _slab_rows(report)),
            heading + "\n" + table(["whole blocks", "GB/s"], rates),
            table(["checksum", "GB/s"], sums),
        )
    )


def _slab_rows(report: dict[str, Any]) -> list[list[str]]:
    return [
        [
            f"{row['asked_bytes'] / MIB:.0f}",
            f"{row['exact_bytes'] / MIB:.0f}",
            f"{row['torch_pinned_bytes'] / MIB:.0f}",
            "measured" if row["torch_is_measured"] else "by its formula, not measured",
        ]
        for row in report["host_memory"]
    ]
