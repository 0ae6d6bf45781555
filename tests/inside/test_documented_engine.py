"""The example engine in the documentation runs as printed, and a mirror follows it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.engines.watching import FrameByFrame, wait_for

from kvscope_telemetry.ledger import BlockState

PAGE = Path(__file__).parents[2] / "docs/guide/your-own-engine.md"


def test_example_engine_of_the_documentation_is_followed_by_a_mirror(tmp_path: Path) -> None:
    code = PAGE.read_text().split("```python\n")[1].split("```")[0]
    (tmp_path / "nano.py").write_text(code)
    assert len(code.splitlines()) < 75
    endpoint = f"ipc://{tmp_path}/nano"
    engine = subprocess.Popen([sys.executable, str(tmp_path / "nano.py"), endpoint, "400"])
    try:
        wait_for(tmp_path / "nano" / "telemetry")
        watcher = FrameByFrame(endpoint)
        try:
            most, num_frames = 0, 0
            for frame in watcher.frames(seconds=10):
                mirror = watcher.mirror
                tables = [mirror.requests.table(number).tolist() for number in mirror.requests.number.tolist()]
                held = sorted(block for table in tables for block in table)
                assert held == [n for n, state in enumerate(mirror.ledger.state) if state == BlockState.ACTIVE]
                assert mirror.ledger.filled.sum() == sum(
                    int(mirror.requests.num_computed_tokens[row]) for row, table in enumerate(tables) if table
                )
                most, num_frames = max(most, len(held)), num_frames + 1
                if frame.step > 300:
                    break
            assert num_frames > 100
            assert watcher.mirror.counters.generation_tokens > 20
            assert most > 20
        finally:
            watcher.close()
    finally:
        engine.kill()
        engine.wait()
