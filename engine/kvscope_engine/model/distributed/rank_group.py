"""All-reduce among ranks on one machine: gloo over loopback on CPUs, NCCL on GPUs.

Owns the connections between the ranks' devices, and counts the points at which ranks synchronize. In an all-reduce on
CPUs, the host waits for the other ranks; on GPUs, the device's stream waits. These waits have no timeout. A host that
waits polls `is_lost`, with which `leader` reports a lost rank; `leader` also ends the other ranks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from kvscope_engine.model.distributed.rank import Rank
from kvscope_telemetry.errors import KvscopeError

CONNECT_TIMEOUT: Final = timedelta(seconds=120)
"""Maximum time until all ranks have connected and completed the first all-reduce."""
NO_LIMIT: Final = timedelta(days=30)
"""Timeout of later all-reduces, practically unlimited: rank 0 may be suspended in the middle of a step."""
_FAILURE_CHECK_INTERVAL: Final = timedelta(seconds=0.2)
STORE_FILE: Final = "store"


class GroupBroken(KvscopeError):
    """Raised when another rank does not respond, because it has exited or hangs."""


class RankGroup:
    """Process group of all ranks that share `folder`. Creation blocks until all ranks have created it.

    `is_lost` returns whether a rank is known to be lost.

    Raises:
        GroupBroken: A rank was lost, or did not connect in time.
    """

    def __init__(
        self, folder: Path, rank: Rank, device: torch.device, is_lost: Callable[[], bool] = lambda: False
    ) -> None:
        distributed: Any = dist
        store = distributed.FileStore(str(folder / STORE_FILE), rank.count)
        store.set_timeout(CONNECT_TIMEOUT)
        self._is_cuda = device.type == "cuda"
        self._device = device
        self._count = rank.count
        self._is_lost = is_lost
        self._only_records = False
        self.num_points = 0
        """Number of all-reduces, broadcasts and steps of this rank; equal on all ranks.

        All-reduces recorded in CUDA graphs do not count: ranks do not wait in them, and a rank whose capture fails
        skips them.
        """
        try:
            self._group: Any = (_nccl if self._is_cuda else _gloo)(store, rank)
            self._wait(self._group.allreduce([first := torch.zeros(1, device=device)]), CONNECT_TIMEOUT)
            first.tolist()
        except RuntimeError as error:
            raise _broken(error) from error

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """Sum the tensor over all ranks, in place."""
        if self._only_records and not torch.cuda.is_current_stream_capturing():
            return part
        self.num_points += not self._only_records
        try:
            self._wait(self._group.allreduce([part]))
        except RuntimeError as error:
            raise _broken(error) from error
        return part

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        self.num_points += 1
        try:
            self._wait(self._group.broadcast(tensor, 0))
        except RuntimeError as error:
            raise _broken(error) from error
        return tensor

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        self._only_records = True
        try:
            yield
        finally:
            self._only_records = False

    def all_agree(self, is_well: bool) -> bool:
        votes = torch.full((1,), float(is_well), device=self._device)
        return self.all_reduce(votes).item() == self._count

    def abort(self) -> None:
        """Abort pending all-reduces on the GPU, from any thread. They return without results.

        On a CPU, waiting hosts notice a lost rank by polling `is_lost`.
        """
        group = self._group
        if self._is_cuda and group is not None:
            with contextlib.suppress(RuntimeError):  # ignore errors: a rank is lost already
                group.abort()

    def close(self) -> None:
        """Release the connections. Idempotent."""
        self._group = None

    def _wait(self, work: Any, limit: timedelta = NO_LIMIT) -> None:
        if self._is_cuda:
            work.wait()  # blocks the stream, not the host
            return
        remaining = limit
        while True:
            try:
                work.wait(_FAILURE_CHECK_INTERVAL)
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # raises the error of the operation
                    return
            remaining -= _FAILURE_CHECK_INTERVAL
            if self._is_lost() or remaining <= timedelta():
                raise RuntimeError("a rank is lost" if self._is_lost() else "it did not connect in time")


def _gloo(store: Any, rank: Rank) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]  # loopback only
    options._timeout = NO_LIMIT
    return gloo(store, rank.index, rank.count, options)


def _nccl(store: Any, rank: Rank) -> Any:
    nccl: Any = dist.ProcessGroupNCCL
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # torch's watchdog would silently end the process
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")  # nothing is connected while a graph is captured
    options = nccl.Options()
    options._timeout = NO_LIMIT
    return nccl(store, rank.index, rank.count, options)


def _broken(error: RuntimeError) -> GroupBroken:
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return GroupBroken(f"another rank does not answer ({line:.160})")
