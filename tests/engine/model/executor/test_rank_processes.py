"""How rank processes are ended."""

from __future__ import annotations

import subprocess
import time

import pytest

from kvscope_engine.model.executor import rank_processes as processes_module
from kvscope_engine.model.executor.rank_processes import RankProcesses


class DeafProcess:
    """A child that reacts only to SIGKILL, and records how long it was waited for."""

    def __init__(self) -> None:
        self.waited_s = 0.0
        self.is_killed = False

    def wait(self, timeout: float | None = None) -> int:
        if self.is_killed:
            return -9
        assert timeout is not None, "it would be waited for without end"
        self.waited_s += timeout
        time.sleep(timeout)
        raise subprocess.TimeoutExpired("rank", timeout)

    def terminate(self) -> None:
        """Ignore the signal."""

    def kill(self) -> None:
        self.is_killed = True


@pytest.mark.parametrize("reached", [(), (1, 2, 3, 4, 5)])
def test_ranks_that_do_not_end_share_one_timeout(reached: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes_module, "EXIT_TIMEOUT_S", 0.2)
    ranks = RankProcesses(6)
    children = [DeafProcess() for _ in range(5)]
    ranks.children.update(dict(enumerate(children, 1)))  # type: ignore[arg-type]
    ranks.close(reached)
    assert all(child.is_killed for child in children)
    assert sum(child.waited_s for child in children) <= 0.4 + 1e-6, (
        "one timeout to end by themselves and one after a signal"
    )
