"""Process of a rank other than 0: loads its share of the model and runs the steps that rank 0 sends.

Has no scheduler, no requests and no sampler. Writes nothing to the terminal; a final error message is sent to rank 0.
The process ends when rank 0 sends `Shutdown` or has ended itself.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec
import torch

from kvscope_engine.model.distributed.rank import Rank
from kvscope_engine.model.distributed.rank_group import GroupBroken, RankGroup
from kvscope_engine.model.executor.rank_channel import Channel, ChannelClosed, connect
from kvscope_engine.model.executor.rank_messages import (
    BlocksMoved,
    FillLoraSlot,
    LoadShare,
    MoveBlocks,
    RankFailed,
    RankHeartbeat,
    RankHello,
    RankJoined,
    RankSettings,
    Ready,
    Step,
    block_ids_of,
    decode_to_rank,
    deltas_of,
    encode,
    inputs_of,
)
from kvscope_engine.model.executor.rank_processes import FOLDER_KEY, remove_folder, torchrun_store
from kvscope_engine.model.kv_cache.kv_offload.block_mover import BlockMover
from kvscope_engine.model.kv_cache.kv_offload.tier_builder import make_tier_mover
from kvscope_engine.model.layers.fused.all_reduce import install_all_reduce, keep_residual_in_float32
from kvscope_engine.model.layers.lora.lora_slots import LoraSlots, all_slots_used, lora_slots
from kvscope_engine.model.layers.weight_bytes import weights_bytes
from kvscope_engine.model.loaded_model import LoadedModel
from kvscope_engine.model.loader.model_loader import load_model
from kvscope_engine.model.platforms.cpu_threads import CpuThreads
from kvscope_engine.model.runner.kv_cache_spec import groups_of_model, storage_for_model
from kvscope_engine.model.runner.model_runner import ModelRunner
from kvscope_engine.model.runner.pool_size import pool_size
from kvscope_engine.model.runner.product_choice import choose_matmul_kernels
from kvscope_engine.model.runner.runner_config import RunnerConfig
from kvscope_engine.model.runner.step_memory import max_batched_tokens
from kvscope_engine.model.verification.ready_to_run import make_ready_to_run
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.errors import KvscopeError

EXIT_GRACE_S: Final = 5.0
"""Seconds that the main thread has to end this process after rank 0 has ended. After that, another thread ends
the process.
"""
HEARTBEAT_INTERVAL_S: Final = 0.5


def run_follower(folder: Path, rank: Rank) -> int:
    """Serve as `rank` until rank 0 ends. Returns 0 after an orderly shutdown, 1 if this rank failed or rank 0 was
    lost."""
    for signal_number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(
            signal_number, signal.SIG_IGN
        )  # under torchrun all ranks get the terminal's signals; rank 0 ends the others
    try:
        channel = connect(folder)
    except KvscopeError:  # rank 0 has ended
        remove_folder(folder)
        return 1
    threading.Thread(target=_watch_leader, args=(channel, folder), name="kvscope-leader-watch", daemon=True).start()
    try:
        channel.send(encode(RankHello(rank=rank.index, pid=os.getpid())))
        _serve(channel, folder, rank)
    except ChannelClosed:
        return 1  # rank 0 is gone: no process is left to report to
    except Exception as error:
        _report_failure(channel, error)
        return 1
    return 0


def follow_torchrun(index: int, count: int) -> int:
    store = torchrun_store()
    return run_follower(Path(store.get(FOLDER_KEY).decode()), Rank(index, count))


def _serve(channel: Channel, folder: Path, rank: Rank) -> None:
    load = decode_to_rank(_receive_next(channel))
    if not isinstance(load, LoadShare):
        return
    config = msgspec.json.decode(load.config, type=EngineConfig)
    if config.device != "cpu" and torch.cuda.is_available():
        torch.cuda.set_device(rank.index)
    threads = CpuThreads(config.num_threads)
    loaded = load_model(config, lambda progress: None, rank)
    fused = make_ready_to_run(loaded.module, loaded.quantization)
    lora = lora_slots(config, loaded, load.lora_layers)
    choose_matmul_kernels(loaded.module, lambda tried: None)
    with all_slots_used(lora):
        num_blocks = pool_size(config, loaded).num_blocks
    channel.send(encode(Ready(num_blocks=num_blocks, float32_residual=fused.float32_residual)))
    settings = decode_to_rank(_receive_next(channel))
    if isinstance(settings, RankSettings):
        _run(channel, folder, rank, config, loaded, lora, settings, threads)


def _run(
    channel: Channel,
    folder: Path,
    rank: Rank,
    config: EngineConfig,
    loaded: LoadedModel,
    lora: LoraSlots | None,
    settings: RankSettings,
    threads: CpuThreads,
) -> None:
    storage = storage_for_model(
        loaded,
        settings.num_blocks,
        config.block_size,
        config.kv_cache_dtype,
        sparse_decode=config.sparse_decode,
        groups=groups_of_model(config, loaded),
    )
    runner = ModelRunner(
        loaded,
        storage,
        RunnerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=max_batched_tokens(config, loaded.device.type),
            enforce_eager=not settings.captures,
            shares_graphs=True,
            sparse_decode=config.sparse_decode,
        ),
        lora=lora,
    )
    runner.warm_up(lambda progress: None)
    keep_residual_in_float32(loaded.module, settings.float32_residual)
    mover = make_tier_mover(_config_of_rank(config, rank), storage, "")
    group = RankGroup(folder, rank, loaded.device)
    install_all_reduce(loaded.module, group.all_reduce)
    threading.Thread(target=_send_heartbeats, args=(channel, group), name="kvscope-beat", daemon=True).start()
    num_bytes = weights_bytes(loaded.module)
    channel.send(
        encode(RankJoined(weights_bytes=num_bytes, kv_bytes=storage.num_bytes, device=_device_name(loaded.device)))
    )
    if settings.captures:
        runner.capture_shared_graphs(group)
    while isinstance(message := decode_to_rank(_receive_next(channel)), Step | FillLoraSlot | MoveBlocks):
        if isinstance(message, Step):
            threads.refresh()
            inputs, copies, slots = inputs_of(message)
            sampled = None
            if inputs.awaited is not None:
                sampled = group.broadcast(torch.zeros(message.num_sampled, dtype=torch.int64, device=loaded.device))
            runner.run_as_follower(inputs, copies, slots, sampled, message.graph_size)
            group.num_points += 1
        elif isinstance(message, FillLoraSlot) and lora is not None:
            lora.fill(message.stack, message.slot, deltas_of(message, loaded.dtype))
        elif isinstance(message, MoveBlocks) and mover is not None:
            _move_blocks(mover, message, channel)
    if mover is not None:
        mover.close()
    group.close()


def _move_blocks(mover: BlockMover, message: MoveBlocks, channel: Channel) -> None:
    """Move blocks as `message` orders. A reply is sent only for the kinds of moves whose result rank 0 waits for."""
    sources, targets = block_ids_of(message)
    if message.how == "flush":
        mover.flush()
    elif message.how == "save":
        mover.save(sources, targets)
    elif message.how == "load":
        mover.load(sources, targets)
    elif message.how == "drain":
        channel.send(encode(BlocksMoved(succeeded=bytes((mover.drain(),)))))
    elif message.how == "load_from_disk":
        channel.send(encode(BlocksMoved(succeeded=bytes(mover.load_from_disk(sources, targets)))))
    else:
        channel.send(encode(BlocksMoved(succeeded=bytes(mover.offload(sources, targets, (None,) * len(sources))))))


def _send_heartbeats(channel: Channel, group: RankGroup) -> None:
    with contextlib.suppress(ChannelClosed):
        while True:
            channel.send(encode(RankHeartbeat(num_points=group.num_points)))
            time.sleep(HEARTBEAT_INTERVAL_S)


def _config_of_rank(config: EngineConfig, rank: Rank) -> EngineConfig:
    """Return `config` with a separate disk tier file for this rank."""
    path = config.disk_kv_path
    return config if path is None else replace(config, disk_kv_path=f"{path}.rank{rank.index}")


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else "CPU"


def _receive_next(channel: Channel) -> bytes:
    """Wait without limit for the next message and return it. Raises ChannelClosed if rank 0 has ended."""
    select.select([channel], [], [])
    return channel.receive()


def _report_failure(channel: Channel, error: Exception) -> None:
    line = " ".join(str(error).split())[:300] or type(error).__name__
    text = f"failed: {line}" if not isinstance(error, RuntimeError) else f"failed: {type(error).__name__}: {line}"
    try:
        channel.send(encode(RankFailed(reason=text, is_consequence=isinstance(error, GroupBroken))))
    except ChannelClosed:
        return


def _watch_leader(channel: Channel, folder: Path) -> None:
    """Wait until rank 0 has ended, then remove the folder in which the ranks' sockets are, and exit even if the main
    thread is blocked.
    """
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLRDHUP)
    poll.poll()
    time.sleep(EXIT_GRACE_S)
    remove_folder(folder)
    os._exit(1)


def main() -> int:
    """Entry point: `python -m kvscope_engine.model.executor.follower FOLDER RANK COUNT`."""
    folder, index, count = sys.argv[1:]
    return run_follower(Path(folder), Rank(int(index), int(count)))


if __name__ == "__main__":
    os._exit(main())  # skip torch's teardown: rank 0 waits for this process to end
