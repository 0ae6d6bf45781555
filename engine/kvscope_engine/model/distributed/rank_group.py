"""How ranks add up tensors: gloo over loopback on CPUs, NCCL on GPUs. One machine.

Owns the connections between the ranks' devices, and counts the points at which ranks wait for each other. On a CPU
the host waits in each sum, on a GPU the device's stream does. Neither wait has a limit of its own: whether another
rank still comes is known by the `leader`, which is asked meanwhile (`is_lost`), and which ends the others.
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

CONNECT: Final = timedelta(seconds=120)
"""For the slowest rank to connect, and to take part in the first sum."""
NO_LIMIT: Final = timedelta(days=30)
"""Of a sum: rank 0 may be suspended in the middle of a step."""
LOOK: Final = timedelta(seconds=0.2)
"""Between two looks at whether a rank is lost while a host waits."""
STORE_FILE: Final = "store"


class GroupBroken(KvscopeError):
    """Another rank did not answer: it is gone, or stuck."""


class RankGroup:
    """All ranks that share `folder`; made when all of them make it. Raises GroupBroken when one does not.

    `is_lost` says whether a rank is known not to come any more.
    """

    def __init__(
        self, folder: Path, rank: Rank, device: torch.device, is_lost: Callable[[], bool] = lambda: False
    ) -> None:
        distributed: Any = dist
        store = distributed.FileStore(str(folder / STORE_FILE), rank.count)
        store.set_timeout(CONNECT)
        self._is_cuda = device.type == "cuda"
        self._device = device
        self._count = rank.count
        self._is_lost = is_lost
        self._only_records = False
        self.num_points = 0
        """Sums, broadcasts and steps that this rank has come to; the others come to the same ones. What is recorded is
        none: nobody waits in it, and a rank whose capture fails leaves it out."""
        try:
            self._group: Any = (_nccl if self._is_cuda else _gloo)(store, rank)
            self._wait(self._group.allreduce([first := torch.zeros(1, device=device)]), CONNECT)
            first.tolist()
        except RuntimeError as error:
            raise _broken(error) from error

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' parts, in place."""
        if self._only_records and not torch.cuda.is_current_stream_capturing():
            return part
        self.num_points += not self._only_records
        try:
            self._wait(self._group.allreduce([part]))
        except RuntimeError as error:
            raise _broken(error) from error
        return part

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0's, which the others' are overwritten with."""
        self.num_points += 1
        try:
            self._wait(self._group.broadcast(tensor, 0))
        except RuntimeError as error:
            raise _broken(error) from error
        return tensor

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, sums are left out that no CUDA graph records."""
        self._only_records = True
        try:
            yield
        finally:
            self._only_records = False

    def all_agree(self, is_well: bool) -> bool:
        """Whether all ranks say so; waits for them."""
        votes = torch.full((1,), float(is_well), device=self._device)
        return self.all_reduce(votes).item() == self._count

    def abort(self) -> None:
        """End what GPUs wait for, on any thread: sums come back with nothing in them. A host's waits end by looks."""
        group = self._group
        if self._is_cuda and group is not None:
            with contextlib.suppress(RuntimeError):  # whatever it has to say, a rank is lost already
                group.abort()

    def close(self) -> None:
        """Let go of the connections. Idempotent."""
        self._group = None

    def _wait(self, work: Any, limit: timedelta = NO_LIMIT) -> None:
        if self._is_cuda:
            work.wait()  # the stream's: the host goes on
            return
        left = limit
        while True:
            try:
                work.wait(LOOK)
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # raises what it failed of
                    return
            left -= LOOK
            if self._is_lost() or left <= timedelta():
                raise RuntimeError("a rank is lost" if self._is_lost() else "it did not connect in time")


def _gloo(store: Any, rank: Rank) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]  # nobody but this machine
    options._timeout = NO_LIMIT
    return gloo(store, rank.index, rank.count, options)


def _nccl(store: Any, rank: Rank) -> Any:
    nccl: Any = dist.ProcessGroupNCCL
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # torch's own watch would end the process, silently
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")  # nothing is connected while a graph is captured
    options = nccl.Options()
    options._timeout = NO_LIMIT
    return nccl(store, rank.index, rank.count, options)


def _broken(error: RuntimeError) -> GroupBroken:
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return GroupBroken(f"another rank does not answer ({line:.160})")
