"""Kill an app at random moments while it records and keeps its past, and check what is left.

    python -m tests.end_to_end.kills --times 20

For each kill: how long before it the recording and the ring end, whether both can be read, and whether the recording
can be recovered (`kvscope recover`). The next start offers what the last one kept. Prints a table; exits with 1 if a
check fails, or if more than a second is lost.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.end_to_end.desktop_process import DesktopProcess, simulated_engine

from kvscope_telemetry.recordings.orphaned_rings import find_orphaned_rings
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.ring_folder import is_held
from kvscope_telemetry.recordings.save import save

MAX_LOST_S = 1.0


@dataclass(frozen=True)
class KillResult:
    """State of the files after one kill."""

    recorded_s: float
    lost_s: float
    """Seconds from the end of the recording to the kill."""
    ring_lost_s: float
    num_recovered: int


def kill_once(endpoint: str, home: Path, after_s: float) -> KillResult:
    """Start an app, let it record, and kill it `after_s` after its file has a state."""
    path = home / f"{time.time_ns()}.mcap"
    part = path.with_name(path.name + ".part")
    with DesktopProcess(endpoint, home) as desktop:
        desktop.wait_for("live")
        desktop.send_line(f"record {path}")
        desktop.wait_for(f"recording {path}")
        while part.stat().st_size < 1_000:
            time.sleep(0.02)
        time.sleep(after_s)
        killed_ns = time.time_ns()
        desktop.kill()
    recording = Recording.open(part)
    assert recording.num_damaged == 0, recording.damage_details
    whole = path.with_name(f"whole-{path.name}")
    recovered = save(recording, whole)
    assert recovered.num_without_state == 0, "a state goes before the first frame"
    assert Recording.open(whole).state_at(1e9).seq == recording.state_at(1e9).seq
    while any(is_held(folder) for folder in desktop.rings.iterdir()):
        time.sleep(0.02)  # the writing process ends after it wrote what it was given
    ring = find_orphaned_rings(desktop.rings)[0]
    ring_recording = Recording.open(ring.folder)
    assert ring_recording.state_at(1e9).hello is not None
    return KillResult(
        recording.info.duration_s,
        (killed_ns - recording.end_ns) / 1e9,
        (killed_ns - ring_recording.end_ns) / 1e9,
        recovered.num_frames,
    )


def offer_of_next_start(endpoint: str, home: Path) -> str:
    """Return the banner with which the next start offers what was left."""
    with DesktopProcess(endpoint, home) as desktop:
        banner = desktop.wait_for("banner ")
        assert desktop.quit() == 0
    return banner.removeprefix("banner ")


def kill_often(times: int, seed: int, longest_s: float = 5.0) -> tuple[list[KillResult], str]:
    """Return what each kill left, and the offer of the next start after the last."""
    moments = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="kvscope-kills-") as folder:
        endpoint, home = f"ipc://{folder}/engine/telemetry", Path(folder)
        (home / "engine").mkdir(mode=0o700)
        with simulated_engine(endpoint, blocks=20_000, rate=200.0):
            left = [kill_once(endpoint, home, moments.uniform(0.0, longest_s)) for _ in range(times)]
            return left, offer_of_next_start(endpoint, home)


def main() -> int:
    """Kill, print a table and set the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    left, banner = kill_often(args.times, args.seed)
    print("recorded  lost     lost of the ring  frames recovered")
    for each in left:
        print(
            f"{each.recorded_s:6.2f} s  {each.lost_s:5.3f} s  {each.ring_lost_s:5.3f} s           {each.num_recovered}"
        )
    worst_s = max(max(each.lost_s, each.ring_lost_s) for each in left)
    print(f"at most {worst_s:.3f} s lost in {len(left)} kills; the next start says: {banner!r}")
    return int(worst_s > MAX_LOST_S or "can be looked at again" not in banner)


if __name__ == "__main__":
    sys.exit(main())
