"""A real engine under pressure records itself, and the exported data names who was preempted for whom."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from mcap.reader import make_reader

from kvscope_telemetry.messages.commands import Control


def _kvscope(*words: str) -> str:
    command = [sys.executable, "-m", "kvscope_app.main", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env={})
    assert done.returncode == 0, done.stderr
    return done.stdout


def _cut_after_the_first_state(path: Path, copy: Path) -> None:
    """Copy what a kill in the middle leaves: the chunk of the hello, and the first one with a state of the pool."""
    shutil.copy(path, copy)
    with path.open("rb") as file:
        summary = make_reader(file).get_summary()
    assert summary is not None
    _hello, state, *_ = sorted(summary.chunk_indexes, key=lambda chunk: chunk.chunk_start_offset)
    os.truncate(copy, state.chunk_start_offset + state.chunk_length + 10)


def test_recording_of_serve_can_be_shown_exported_and_recovered(
    start_engine: Callable,  # type: ignore[type-arg]
    connect_client: Callable,  # type: ignore[type-arg]
    tiny_model: Callable[..., str],
    tmp_path: Path,
) -> None:
    path = tmp_path / "session.mcap"
    engine = start_engine(
        *("--model", tiny_model(), "--dtype", "float32", "--num-gpu-blocks-override", "8", "--record", str(path))
    )
    talk = connect_client(engine)
    talk.source.send(Control(action="pause"))  # so that they run together
    for number in range(4):
        talk.submit_ids(f"r{number}", range(1 + number, 34 + number), max_tokens=40)
    talk.source.send(Control(action="resume"))
    talk.wait_for(lambda: len(talk.finished()) == 4)
    talk.source.close()
    engine.process.send_signal(signal.SIGTERM)
    assert engine.process.wait(240) == 0
    assert path.exists()
    assert not Path(f"{path}.part").exists()

    found = json.loads(_kvscope("info", "--json", str(path)))
    assert found["is_complete"]
    assert found["damage"] == []
    assert found["totals"]["finished"] == 4
    assert found["totals"]["preemptions"] > 0
    for name in ("requests.csv", "trace.perfetto-trace", "report.html"):
        _kvscope("export", str(path), "--out", str(tmp_path / name))
    with (tmp_path / "requests.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["request_id"] for row in rows] == ["r0", "r1", "r2", "r3"]
    assert {row["state"] for row in rows} == {"finished"}
    assert {row["num_output_tokens"] for row in rows} == {"40"}
    assert sum(int(row["num_preemptions"]) for row in rows) == found["totals"]["preemptions"]
    assert all(int(row["first_token_ns"]) >= int(row["queue_ns"]) >= 0 for row in rows)
    assert "and none was available" in (tmp_path / "report.html").read_text("utf-8")

    cut = tmp_path / "cut.mcap"
    _cut_after_the_first_state(path, cut)
    assert "Truncated" in _kvscope("recover", str(cut), "--out", str(tmp_path / "mended.mcap"))
    assert json.loads(_kvscope("info", "--json", str(tmp_path / "mended.mcap")))["is_complete"]
