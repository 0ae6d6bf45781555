"""Runs commands with several ranks: turns a process that torchrun started into a follower rank, and ends a service that
lost a rank.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from kvscope_engine.model.executor.rank_processes import torchrun_rank
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.errors import BadInput

if TYPE_CHECKING:
    from kvscope_engine.engine import Engine


def run_as_follower(config: EngineConfig) -> int | None:
    """Run as the rank that torchrun assigned to this process, until rank 0 ends.

    Returns the exit code, or None on rank 0 and without torchrun. Raises BadInput if torchrun started a different
    number of ranks than `config` requires.
    """
    rank_and_count = torchrun_rank()
    if rank_and_count is None:
        return None
    rank, count = rank_and_count
    if count != config.tensor_parallel_size:
        raise BadInput(
            f"--tensor-parallel-size {config.tensor_parallel_size} is not accepted: torchrun started {count} ranks"
        )
    if rank == 0:
        return None
    from kvscope_engine.model.executor.follower import follow_torchrun

    return follow_torchrun(rank, count)


def stop_when_rank_lost(engine: Engine) -> None:
    """Send this process SIGTERM when a rank is lost, so that even an idle service ends."""
    if engine.components.leader is not None:
        engine.components.leader.call_when_lost(lambda: os.kill(os.getpid(), signal.SIGTERM))
