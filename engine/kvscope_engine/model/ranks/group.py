"""How ranks add up tensors: gloo over loopback on CPUs, NCCL on GPUs. One machine; every wait is bounded.

Owns the connections between the ranks' devices. A rank that is gone is an error here, never a hang; which one it was
is known by the `leader`.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from kvscope_engine.model.ranks.rank import Rank
from kvscope_telemetry.errors import KvscopeError

TIMEOUT: Final = timedelta(seconds=120)
"""For the slowest rank to come to the same point of a step, kernels that it compiles there included."""
STORE_FILE: Final = "store"


class GroupBroken(KvscopeError):
    """Another rank did not answer: it is gone, or stuck."""


class RankGroup:
    """All ranks that share `folder`; made when all of them make it. Raises GroupBroken when one does not."""

    def __init__(self, folder: Path, rank: Rank, device: torch.device) -> None:
        distributed: Any = dist
        store = distributed.FileStore(str(folder / STORE_FILE), rank.count)
        store.set_timeout(TIMEOUT)
        make = _nccl if device.type == "cuda" else _gloo
        try:
            self._group: Any = make(store, rank)
            self.all_reduce(torch.zeros(1, device=device)).tolist()
        except RuntimeError as error:
            raise _broken(error) from error

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' parts, in place."""
        try:
            self._group.allreduce([part]).wait()
        except RuntimeError as error:
            raise _broken(error) from error
        return part

    def close(self) -> None:
        """Let go of the connections. Idempotent."""
        self._group = None


def _gloo(store: Any, rank: Rank) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]  # nobody but this machine
    options._timeout = TIMEOUT
    return gloo(store, rank.index, rank.count, options)


def _nccl(store: Any, rank: Rank) -> Any:
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = TIMEOUT
    return nccl(store, rank.index, rank.count, options)


def _broken(error: RuntimeError) -> GroupBroken:
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return GroupBroken(f"another rank does not answer ({line:.160})")
