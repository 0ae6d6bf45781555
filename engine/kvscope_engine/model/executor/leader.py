"""Rank 0's side of tensor parallelism: starts the other ranks, sends them settings and steps, and monitors them.

Only rank 0 schedules, keeps the block ledger, samples and serves clients. It sends the arrays of each step before
running it, and all ranks run the step at the same time; they synchronize in the all-reduces after each layer's
projections. Block ids are the same on all ranks: a block comprises the heads of all ranks, and each rank has as many
blocks as the rank with the least capacity.

Owns the channels and the state of each rank; one thread receives all messages. A serving rank sends two heartbeats per
second. A rank that is silent, or does not reach a point where the others wait for it, is killed, and the pending
collective is ended (`RankGroup.abort`). A rank whose process is suspended is waited for up to `MAX_SUSPENDED_S`. If a
rank fails, the engine ends, because no other rank has its part of the KV.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final, TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from kvscope_engine.model.distributed.rank import ALONE, Rank
from kvscope_engine.model.distributed.rank_group import GroupBroken, RankGroup
from kvscope_engine.model.executor.rank_channel import Channel, ChannelClosed, listen
from kvscope_engine.model.executor.rank_messages import (
    BlocksMoved,
    FromRank,
    LoadShare,
    RankFailed,
    RankHeartbeat,
    RankHello,
    RankJoined,
    RankSettings,
    Ready,
    Shutdown,
    decode_from_rank,
    encode,
    fill_of,
    move_of,
    step_of,
)
from kvscope_engine.model.executor.rank_processes import RankProcesses
from kvscope_engine.model.input_batch.step_inputs import StepInputs
from kvscope_engine.model.kv_cache.kv_offload.block_mover import MoveKind
from kvscope_engine.model.layers.fused.all_reduce import install_all_reduce, keep_residual_in_float32
from kvscope_engine.model.layers.lora.peft_folder import Delta
from kvscope_engine.model.platforms.cpu_threads import default_num_threads
from kvscope_engine.model.platforms.device import choose_device
from kvscope_engine.model.verification.fuse import FusedCounts
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.errors import BadInput, KvscopeError
from kvscope_telemetry.messages.telemetry import RankMemory

CONNECT_TIMEOUT_S: Final = 300.0
"""Maximum seconds for a rank's process to connect, which includes importing torch and transformers on a busy machine.
"""
LOAD_TIMEOUT_S: Final = 1800.0
CHECK_INTERVAL_S: Final = 0.25
MAX_SILENCE_S: Final = 5.0
"""Maximum seconds without a message from a serving rank, unless it is suspended. It sends two heartbeats per second."""
MAX_SUSPENDED_S: Final = 300.0
"""Maximum seconds for which a rank's process may be suspended (SIGSTOP, a debugger). A suspended rank need not
send messages.
"""
MAX_BEHIND_S: Final = 60.0
"""Maximum seconds for which a live rank may be behind rank 0's synchronization point, for example because it compiles a
kernel that the other ranks have cached.
"""
EVENT_POLL_S: Final = 0.000_05
CAUSE_TIMEOUT_S: Final = 3.0
"""Seconds to wait for the cause of a failed collective, which may be reported after the failure itself."""

M = TypeVar("M", bound=FromRank)


def lead_ranks(config: EngineConfig) -> Leader | None:
    """Start the other ranks that `config` requests; None for a single rank."""
    count = config.tensor_parallel_size
    return None if count == 1 else Leader(count, choose_device(config.device))


def config_of_rank(config: EngineConfig, leader: Leader | None) -> EngineConfig:
    """Return the configuration with which each rank runs.

    CPU threads and the lower cache tiers are divided among ranks, and features that do not support several ranks are
    disabled.
    """
    if leader is None:
        return config
    count = leader.rank.count
    return replace(
        config,
        piecewise_graphs=False,
        quantization="none",
        num_threads=config.num_threads or max(1, default_num_threads() // count),
        host_kv_memory_bytes=config.host_kv_memory_bytes // count,
        disk_kv_memory_bytes=config.disk_kv_memory_bytes // count,
    )


def rank_of(leader: Leader | None) -> Rank:
    return ALONE if leader is None else leader.rank


class Leader:
    """Rank 0 of `count` ranks: controls the other ranks. Methods raise BadInput or KvscopeError, naming the rank, for
    errors of other ranks.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        if device.type == "cuda" and torch.cuda.device_count() < count:
            raise BadInput(
                f"tensor_parallel_size={count} is not accepted: GPUs found: {torch.cuda.device_count()}"
                " (--device cpu runs all ranks on the CPU)"
            )
        self.rank = Rank(0, count)
        self.joined_ranks: tuple[RankJoined, ...] = ()
        """Memory and device of each of the other ranks, in rank order."""
        self._device = device
        self._settings: RankSettings | None = None
        self._group: RankGroup | None = None
        self._channels: dict[int, Channel] = {}
        self._pids: dict[int, int] = {}
        self._inboxes: dict[int, queue.SimpleQueue[FromRank]] = {}
        """Queue of received messages for each rank, without heartbeats."""
        self._liveness: dict[int, RankLiveness] = {}
        self._is_serving = threading.Event()
        self._failures: list[tuple[int, RankFailed]] = []
        self._failed = threading.Event()
        self._closing = threading.Event()
        self._on_rank_lost: Callable[[], None] = lambda: None
        self._monitor: threading.Thread | None = None
        self._is_in_step = False
        self.processes = RankProcesses(count)
        try:
            self._listener = listen(self.processes.folder, count)
            self.processes.start()
        except BaseException:
            self.processes.close()
            raise

    # Called before the first step, in this order.

    def load_model(self, config: EngineConfig, lora_layers: Iterable[str]) -> None:
        """Order the other ranks to load their shares of the model. Rank 0 must have loaded first, so that every file is
        downloaded.
        """
        self._await_connections()
        config_json = msgspec.json.encode(replace(config, kv_events_config=None))
        message = encode(LoadShare(config=config_json, lora_layers=tuple(lora_layers)))
        for rank, channel in self._channels.items():
            self._send(rank, channel, message)

    def agree_on_blocks(self, num_blocks: int, fused: FusedCounts) -> int:
        """Return the number of blocks that fit on every rank, if `num_blocks` fit on rank 0."""
        ready = [self._expect(rank, Ready, LOAD_TIMEOUT_S) for rank in sorted(self._channels)]
        self._settings = RankSettings(
            num_blocks=min(num_blocks, *(rank_ready.num_blocks for rank_ready in ready)),
            float32_residual=fused.float32_residual and all(rank_ready.float32_residual for rank_ready in ready),
        )
        return self._settings.num_blocks

    def connect_ranks(self, module: nn.Module, *, captures: bool = False) -> None:
        """Let all ranks allocate their blocks and connect. All later forward passes of `module` run on all ranks.

        `captures`: whether all ranks capture CUDA graphs next.
        """
        assert self._settings is not None, "ranks agree before they join"
        for rank, channel in self._channels.items():
            self._send(rank, channel, encode(msgspec.structs.replace(self._settings, captures=captures)))
        keep_residual_in_float32(module, self._settings.float32_residual)
        try:
            self._group = RankGroup(self.processes.folder, self.rank, self._device, self._failed.is_set)
        except GroupBroken as error:
            raise self._rank_lost_error(error) from error
        self.joined_ranks = tuple(self._expect(rank, RankJoined, LOAD_TIMEOUT_S) for rank in sorted(self._channels))
        self._is_serving.set()
        install_all_reduce(module, self.all_reduce)

    def recording(self) -> contextlib.AbstractContextManager[None]:
        assert self._group is not None, "ranks capture once they have joined"
        return self._group.recording()

    def all_agree(self, is_well: bool) -> bool:
        """Return whether `is_well` is true on all ranks, after waiting for them. Raises KvscopeError when a rank is
        lost.
        """
        assert self._group is not None, "ranks agree once they have joined"
        try:
            agreed = self._group.all_agree(is_well)
        except GroupBroken as error:
            raise self._rank_lost_error(error) from error
        if self._failed.is_set():
            raise self._rank_lost_error(None)
        return agreed

    # Steps.

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks. Raises KvscopeError with the reason when a rank is lost."""
        assert self._group is not None, "ranks add up once they have joined"
        try:
            return self._group.all_reduce(part)
        except GroupBroken as error:
            raise self._rank_lost_error(error) from error

    def broadcast_tokens(self, tokens: torch.Tensor) -> None:
        """Broadcast the tokens sampled by the previous step; `send_step` has sent their number to the other ranks.

        Raises KvscopeError when a rank is lost.
        """
        assert self._group is not None, "ranks share tokens once they have joined"
        try:
            self._group.broadcast(tokens.contiguous())
        except GroupBroken as error:
            raise self._rank_lost_error(error) from error

    def wait_for(self, event: torch.cuda.Event) -> None:
        """Wait until a GPU has reached `event`, polling so that signals are handled.

        Raises KvscopeError when a rank is lost; the results of the step are then invalid.
        """
        with self._naming_lost_rank():
            while not self._failed.is_set() and not event.query():  # type: ignore[no-untyped-call]
                time.sleep(EVENT_POLL_S)
        if self._failed.is_set():
            raise self._rank_lost_error(None)

    def move_blocks(
        self,
        how: MoveKind,
        sources: Sequence[int] = (),
        targets: Sequence[int] = (),
    ) -> None:
        """Order the other ranks to move the same blocks between tiers once they have run the steps sent
        earlier. All ranks must move a block, because each rank stores different heads of it.
        """
        message = encode(move_of(how, sources, targets))
        for rank, channel in self._channels.items():
            self._send(rank, channel, message)

    def moved_on_all_ranks(self, succeeded: Sequence[bool]) -> list[bool]:
        """Return, per block, whether the last `offload`, `load_from_disk` or `drain` succeeded on all ranks;
        `succeeded` is rank 0's result.
        """
        is_moved = np.array(succeeded, np.bool_)
        for rank in sorted(self._channels):
            is_moved &= np.frombuffer(self._expect(rank, BlocksMoved, LOAD_TIMEOUT_S).succeeded, np.bool_)
        is_moved_list: list[bool] = is_moved.tolist()
        return is_moved_list

    def fill_lora_slot(self, stack: str, slot: int, deltas: Callable[[Rank], Sequence[Delta | None]]) -> None:
        """Replace the LoRA weights in a slot before the next step. Each rank receives only its shard."""
        for index, channel in self._channels.items():
            self._send(index, channel, encode(fill_of(stack, slot, deltas(Rank(index, self.rank.count)))))

    def send_step(
        self,
        inputs: StepInputs,
        copies: Sequence[tuple[int, int]],
        lora_slots: NDArray[np.int64] | None = None,
        num_sampled: int = 0,
        graph_size: int = 0,
    ) -> None:
        """Send the next step to the other ranks.

        No other step may be sent before `report_step_done`, because ranks would otherwise all-reduce layers of
        different steps.

        Args:
            inputs: Arrays of the step.
            copies: Blocks to copy before the step, as (source, target) pairs.
            lora_slots: Adapter slot of each row, as in `StepRows`.
            num_sampled: Number of tokens that the previous step sampled, if this step's inputs include any of them;
                else 0. The other ranks receive that many tokens from `broadcast_tokens` before they run this step.
            graph_size: Size of the CUDA graph that all ranks replay; 0 if none.

        Raises:
            KvscopeError: A rank is lost, or the previous step failed on rank 0.
        """
        if self._failed.is_set():
            raise self._rank_lost_error(None)
        if self._is_in_step:
            raise KvscopeError(
                f"a step failed on rank 0 of {self.rank.count}, and the ranks are no longer at the same layer; if "
                "memory was insufficient, use a smaller --max-num-batched-tokens or --kv-memory"
            )
        self._is_in_step = True
        message = encode(step_of(inputs, copies, lora_slots, num_sampled, graph_size))
        for rank, channel in self._channels.items():
            self._send(rank, channel, message)

    def report_step_done(self) -> None:
        """Record that rank 0 has run the layers of the step, so that the next may be sent."""
        self._is_in_step = False
        if self._group is not None:
            self._group.num_points += 1

    def rank_memory(self, first: RankJoined, uuids: Sequence[str]) -> tuple[RankMemory, ...]:
        """Return the memory that each rank holds, in rank order. `first` describes rank 0; `uuids` identify the ranks'
        GPUs.
        """
        return tuple(
            RankMemory(
                rank=rank,
                device=joined.device,
                weights_bytes=joined.weights_bytes,
                kv_bytes=joined.kv_bytes,
                uuid=uuids[rank] if rank < len(uuids) else "",
            )
            for rank, joined in enumerate((first, *self.joined_ranks))
        )

    # Shutdown.

    @property
    def failure(self) -> str:
        """Why the engine cannot continue, naming the failed rank; empty if no rank failed."""
        causes = sorted(self._failures, key=lambda one: one[1].is_consequence)
        if not causes:
            return ""
        rank, failed = causes[0]
        return f"rank {rank} of {self.rank.count} {failed.reason}: the engine cannot go on without it"

    def call_when_lost(self, callback: Callable[[], None]) -> None:
        """Call `callback` once when a rank is lost, on the monitoring thread, even between steps.

        If a rank is lost already, `callback` is called immediately on the calling thread.
        """
        self._on_rank_lost = callback
        if self._failed.is_set():
            callback()

    def close(self) -> None:
        """End all ranks and wait for their processes. Idempotent."""
        self._closing.set()
        for channel in self._channels.values():
            with contextlib.suppress(ChannelClosed):
                channel.send(encode(Shutdown()))
        if self._monitor is not None:
            self._monitor.join(CAUSE_TIMEOUT_S)  # the thread may hang in a driver
        for channel in self._channels.values():
            channel.close()
        self._listener.close()
        self.processes.close(reached=self._channels)
        if self._group is not None:
            self._group.close()  # after the other ranks ended: a pending all-reduce would block until then

    # Private, on the caller's thread.

    def _await_connections(self) -> None:
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        self._listener.settimeout(CHECK_INTERVAL_S)
        while len(self._channels) < self.rank.count - 1:
            missing = [rank for rank in range(1, self.rank.count) if rank not in self._channels]
            for rank in missing:
                if exit_reason := self.processes.exit_reason(rank):
                    raise KvscopeError(f"rank {rank} of {self.rank.count} {exit_reason} before it was there")
            if time.monotonic() > deadline:
                raise KvscopeError(
                    f"rank {missing[0]} of {self.rank.count} did not start within {CONNECT_TIMEOUT_S:.0f} s"
                )
            with contextlib.suppress(TimeoutError):
                self._accept(self._listener.accept()[0])
        self._inboxes = {rank: queue.SimpleQueue() for rank in self._channels}
        self._liveness = {rank: RankLiveness() for rank in self._channels}
        self._monitor = threading.Thread(target=self._monitor_ranks, name="kvscope-ranks", daemon=True)
        self._monitor.start()

    def _accept(self, connection: socket.socket) -> None:
        channel = Channel(connection)
        try:
            hello = decode_from_rank(channel.receive())
        except ChannelClosed:
            channel.close()
            return  # `_await_connections` checks next how its process ended
        assert isinstance(hello, RankHello), "a rank says first who it is"
        self._channels[hello.rank] = channel
        self._pids[hello.rank] = hello.pid

    def _send(self, rank: int, channel: Channel, message: bytes) -> None:
        try:
            channel.send(message)
        except ChannelClosed as error:
            raise self._rank_lost_error(error) from error

    def _expect(self, rank: int, message_type: type[M], wait_s: float) -> M:
        """Return the rank's next message, which must have type `message_type`.

        Raises:
            KvscopeError: A rank failed, or no message arrived within `wait_s` seconds.
        """
        deadline = time.monotonic() + wait_s
        while not self._failed.is_set():
            with contextlib.suppress(queue.Empty):
                message = self._inboxes[rank].get(timeout=CHECK_INTERVAL_S)
                assert isinstance(message, message_type), f"rank {rank} says what it was not asked for"
                return message
            if time.monotonic() > deadline:
                raise KvscopeError(f"rank {rank} of {self.rank.count} was not ready within {wait_s:.0f} s")
        raise self._rank_lost_error(None)

    def _rank_lost_error(self, error: Exception | None) -> KvscopeError:
        """Return the error to raise for a lost rank, after waiting up to `CAUSE_TIMEOUT_S` seconds for the
        root cause.
        """
        deadline = time.monotonic() + CAUSE_TIMEOUT_S
        while self._monitor is not None and not self._has_cause() and time.monotonic() < deadline:
            time.sleep(0.01)
        return KvscopeError(self.failure or f"{error}")

    @contextlib.contextmanager
    def _naming_lost_rank(self) -> Iterator[None]:
        """Replace a device error that another rank caused with an error that names that rank."""
        try:
            yield
        except RuntimeError as error:
            if self._failed.is_set():
                raise self._rank_lost_error(None) from error
            raise

    def _has_cause(self) -> bool:
        return any(not failed.is_consequence for _, failed in self._failures)

    # On the monitoring thread.

    def _monitor_ranks(self) -> None:
        open_ranks = {channel: rank for rank, channel in self._channels.items()}
        checked_s = time.monotonic()
        while open_ranks and not self._closing.is_set():
            for channel in select.select(list(open_ranks), [], [], CHECK_INTERVAL_S)[0]:
                rank = open_ranks[channel]
                message = self._receive(rank)
                if self._closing.is_set():
                    return
                self._liveness[rank].record_message()
                if isinstance(message, RankFailed):
                    del open_ranks[channel]
                    self._record_failure(rank, message)
                elif isinstance(message, RankHeartbeat):
                    self._liveness[rank].num_points = message.num_points
                else:
                    self._inboxes[rank].put(message)
            now_s = time.monotonic()
            if self._is_serving.is_set():
                self._check_liveness(
                    open_ranks, min(now_s - checked_s, 2 * CHECK_INTERVAL_S)
                )  # capped, since this process may have been suspended
            checked_s = now_s

    def _check_liveness(self, open_ranks: dict[Channel, int], elapsed_s: float) -> None:
        """Kill ranks that have been silent or behind for too long, and record them as failed."""
        assert self._group is not None, "ranks serve once they have joined"
        for channel, rank in list(open_ranks.items()):
            is_suspended = _is_suspended(self._pids[rank])
            reason = self._liveness[rank].advance(elapsed_s, self._group.num_points, is_suspended=is_suspended)
            if reason:
                del open_ranks[channel]
                self._record_failure(rank, RankFailed(reason=reason))
                with contextlib.suppress(OSError):
                    os.kill(self._pids[rank], signal.SIGKILL)

    def _receive(self, rank: int) -> FromRank:
        try:
            message: FromRank = decode_from_rank(self._channels[rank].receive())
        except (ChannelClosed, msgspec.DecodeError) as error:
            return RankFailed(reason=self.processes.exit_reason(rank, CAUSE_TIMEOUT_S) or f"is gone ({error})")
        return message

    def _record_failure(self, rank: int, failed: RankFailed) -> None:
        is_first = not self._failures
        self._failures.append((rank, failed))
        self._failed.set()
        if is_first:
            self._on_rank_lost()
            if self._group is not None:
                self._group.abort()


class RankLiveness:
    """Measures how long a rank has been silent, and how long it has made no progress while rank 0 is ahead."""

    def __init__(self) -> None:
        self.num_points = 0
        """Number of synchronization points that the rank had reached at its last heartbeat."""
        self._silent_s = 0.0
        self._behind_s = 0.0
        self._suspended_s = 0.0
        self._previous_num_points = 0

    def record_message(self) -> None:
        self._silent_s = 0.0

    def advance(self, seconds: float, num_points: int, *, is_suspended: bool = False) -> str:
        """Add `seconds` in which the rank's process ran or was suspended. Rank 0 is at synchronization point
        `num_points`.

        Returns why the rank is considered lost; empty if it is not.
        """
        if is_suspended:
            self._suspended_s += seconds
            return f"has been suspended for {MAX_SUSPENDED_S:.0f} s" if self._suspended_s >= MAX_SUSPENDED_S else ""
        self._suspended_s = 0.0
        has_moved, self._previous_num_points = self.num_points != self._previous_num_points, self.num_points
        self._silent_s += seconds
        self._behind_s = 0.0 if has_moved or self.num_points >= num_points else self._behind_s + seconds
        if self._silent_s >= MAX_SILENCE_S:
            return f"has not answered for {MAX_SILENCE_S:.0f} s"
        return f"has been stuck in a step for {MAX_BEHIND_S:.0f} s" if self._behind_s >= MAX_BEHIND_S else ""


def _is_suspended(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False
