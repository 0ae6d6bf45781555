"""Starts and ends the processes of the other ranks, or finds those that torchrun started.

Owns the child processes and the folder where ranks connect, which only the user can access. `leader` exchanges the
messages.
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

FOLLOWER_MODULE: Final = "kvscope_engine.model.executor.follower"
FOLDER_KEY: Final = "kvscope-ranks"
RENDEZVOUS_TIMEOUT_S: Final = 120.0
"""Maximum seconds until all ranks that torchrun started have connected to its store."""
FOLDER_PREFIX: Final = "kvscope-ranks-"
EXIT_TIMEOUT_S: Final = 3.0
"""Seconds that ranks have to end by themselves, and then again to end after SIGTERM.

Both periods together must be shorter than the ten seconds in which the engine has to stop.
"""


def torchrun_rank(environment: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """Return the rank and the number of ranks if torchrun started this process as one of several, else None.

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
    def __init__(self, count: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))  # mode 0700
        self.children: dict[int, subprocess.Popen[bytes]] = {}
        """Child processes by rank; empty under torchrun."""
        self._count = count

    def start(self) -> None:
        """Start the child processes. Under torchrun, publish the folder for connections to the ranks that torchrun
        started.
        """
        under_torchrun = torchrun_rank()
        if under_torchrun is None:
            for rank in range(1, self._count):
                command = [sys.executable, "-m", FOLLOWER_MODULE, str(self.folder), str(rank), str(self._count)]
                self.children[rank] = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    process_group=0,  # Ctrl-C is for rank 0, which ends the others
                )
        else:
            torchrun_store().set(FOLDER_KEY, str(self.folder))

    def exit_reason(self, rank: int, wait_s: float = 0.0) -> str:
        """Describe how a child ended, waiting up to `wait_s` seconds; empty if it runs or the rank is not a child."""
        child = self.children.get(rank)
        if child is None:
            return ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = child.wait(wait_s)
            return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return ""

    def close(self, reached: Container[int] = ()) -> None:
        """End all remaining children. Idempotent.

        Children in `reached` have been sent a shutdown message and get `EXIT_TIMEOUT_S` seconds; others are terminated.
        """
        deadline_s = time.monotonic() + EXIT_TIMEOUT_S
        for rank, child in self.children.items():
            if rank not in reached or not self.exit_reason(rank, max(0.0, deadline_s - time.monotonic())):
                child.terminate()
        deadline_s = time.monotonic() + EXIT_TIMEOUT_S
        for rank, child in self.children.items():
            if not self.exit_reason(rank, max(0.0, deadline_s - time.monotonic())):
                child.kill()
                child.wait()
        self.children.clear()
        remove_folder(self.folder)


def remove_folder(folder: Path) -> None:
    """Remove the folder where ranks connected. Folders with another prefix are left alone."""
    if folder.name.startswith(FOLDER_PREFIX):
        shutil.rmtree(folder, ignore_errors=True)


def torchrun_store() -> Any:
    """Return the key-value store of torchrun's ranks. Raises KvscopeError if the ranks do not find each other in
    time."""
    from datetime import timedelta

    from torch.distributed.rendezvous import rendezvous

    try:
        store, _, _ = next(iter(rendezvous("env://", timeout=timedelta(seconds=RENDEZVOUS_TIMEOUT_S))))
    except (RuntimeError, ValueError) as error:
        raise KvscopeError(f"torchrun's ranks cannot meet: {error!s:.160}") from error
    return store
