"""The processes of the other ranks: started here, or by torchrun.

Owns the folder where ranks meet, which is the user's alone, and the children. What they say is the `leader`'s.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, Final

from kvscope_telemetry.errors import BadInput, KvscopeError

MODULE: Final = "kvscope_engine.model.executor.follower"
FOLDER_KEY: Final = "kvscope-ranks"
MEET_S: Final = 120.0
"""For torchrun's ranks to say where they meet."""
PREFIX: Final = "kvscope-ranks-"
END_S: Final = 3.0
"""For all ranks together to end by themselves, and for as long again after a signal: a stop has ten seconds."""


def torchrun_rank(environment: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """Rank and number of ranks, where torchrun started this process as one of several.

    Raises BadInput for ranks on several machines.
    """
    size = environment.get("WORLD_SIZE", "1")
    if not size.isdigit() or int(size) < 2 or "MASTER_ADDR" not in environment:
        return None
    if environment.get("LOCAL_WORLD_SIZE", size) != size:
        raise BadInput(
            f"WORLD_SIZE={size} is not accepted: ranks are on one machine (torchrun --nproc-per-node {size})"
        )
    return int(environment.get("RANK", "0")), int(size)


class RankProcesses:
    """Those of ranks 1 and up."""

    def __init__(self, count: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX))  # mode 0700
        self.children: dict[int, subprocess.Popen[bytes]] = {}
        """By rank; none under torchrun."""
        self._count = count

    def start(self) -> None:
        """Start them, or say to those that torchrun started where to come."""
        under_torchrun = torchrun_rank()
        if under_torchrun is None:
            for rank in range(1, self._count):
                command = [sys.executable, "-m", MODULE, str(self.folder), str(rank), str(self._count)]
                self.children[rank] = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    process_group=0,  # Ctrl-C is for rank 0, which ends the others
                )
        else:
            torchrun_store().set(FOLDER_KEY, str(self.folder))

    def ended(self, rank: int, wait_s: float = 0.0) -> str:
        """How a child ended, in words; empty while it has not, and for ranks that are none."""
        child = self.children.get(rank)
        if child is None:
            return ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = child.wait(wait_s)
            return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return ""

    def close(self, reached: Container[int] = ()) -> None:
        """End all that are left: those that were told to may do it by themselves, the rest by signals. Idempotent."""
        deadline_s = time.monotonic() + END_S
        for rank, child in self.children.items():
            if rank not in reached or not self.ended(rank, max(0.0, deadline_s - time.monotonic())):
                child.terminate()
        deadline_s = time.monotonic() + END_S
        for rank, child in self.children.items():
            if not self.ended(rank, max(0.0, deadline_s - time.monotonic())):
                child.kill()
                child.wait()
        self.children.clear()
        forget(self.folder)


def forget(folder: Path) -> None:
    """Take away where ranks met; nothing else is ever taken away."""
    if folder.name.startswith(PREFIX):
        shutil.rmtree(folder, ignore_errors=True)


def torchrun_store() -> Any:
    """That of torchrun's ranks. Raises KvscopeError when they cannot meet."""
    from datetime import timedelta

    from torch.distributed.rendezvous import rendezvous

    try:
        store, _, _ = next(iter(rendezvous("env://", timeout=timedelta(seconds=MEET_S))))
    except (RuntimeError, ValueError) as error:
        raise KvscopeError(f"torchrun's ranks cannot meet: {error!s:.160}") from error
    return store
