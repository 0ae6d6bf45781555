"""Hours at a steady load, and what grows: `python tests/soak.py --minutes 60`.

An engine on the default model, a desktop (without a display) that opens and closes windows and recordings, and
clients that come, ask, hang up in the middle or wait for the end, and go. Every ten seconds the resident memory,
descriptors and threads of engine and desktop are read from /proc. Prints a line a minute, and at the end each quarter,
and whether the last is as the second was: memory within 2 %, descriptors and threads equal. Exits with 1 where not.

What a window keeps of the past is bounded, and takes longer than an hour to fill: some 6 MiB of events, 3 MiB of
requests. So after a minute the events that came are told again until their log is full, and what comes from then on
takes the place of something. Requests are few: a client comes each second at most.

The engine's pool is small: a CPU gives memory to a block when it is first written to, and a large pool fills for longer
than an hour where answers come slowly.

There is one other window at a time: with two at once malloc and Python keep some 8 MiB more from then on, in pages that
are not quite free. With a window opening and closing there are two levels of each. Memory is the mean over a quarter;
the least, which is when that window was closed, is printed beside it. Of descriptors and threads it is the fewest: a
leak raises the fewest too, and a median would be on either level by chance.

Not a test that `make test` runs: it takes as long as it is told to.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvscope_telemetry.messages.telemetry import Event

if TYPE_CHECKING:
    from kvscope_app.session.session import Session

SAMPLE_S = 10.0
MEMORY_TOLERANCE = 0.02
ENOUGH_EVENTS = 20
SECONDS_A_CLIENT = 1.0
NUM_BLOCKS = 256
"""Written to within the first minutes."""
WORDS = "the cache holds blocks of keys and values that later prompts may share when they begin the same"


@dataclass(frozen=True)
class Reading:
    """What /proc says of a process."""

    resident_mib: float
    num_descriptors: int
    num_threads: int


def read_process(pid: int) -> Reading:
    """Now, without the threads of Qt's own pool and the descriptor each is woken by: they come and go with painting."""
    process = Path(f"/proc/{pid}")
    fields = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines() if ":" in line)
    resident_kib = int(fields["VmRSS"].split()[0])
    threads = [name for task in (process / "task").iterdir() if (name := _thread_name(task))]
    num_pooled = threads.count("Thread (pooled)")
    return Reading(resident_kib / 1024, len(os.listdir(process / "fd")) - num_pooled, len(threads) - num_pooled)


def _thread_name(task: Path) -> str:
    """Empty when it ended meanwhile."""
    try:
        return (task / "comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def main() -> int:
    """Run for the time that is asked for, and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long (default 60)")
    parser.add_argument("--model", default="default", help="of the engine (default: default)")
    parser.add_argument("--seed", type=int, default=None, help="of what clients do (default: random, printed)")
    parser.add_argument("--desktop", nargs=2, metavar=("ENDPOINT", "RECORDING"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.desktop:
        return run_desktop(*options.desktop)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        return _soak(Path(name), options.minutes * 60, options.model, random.Random(seed))


def run_desktop(endpoint: str, recording: str) -> int:
    """One window that stays, and others on the engine and on a recording that are opened and closed for ever."""
    from PySide6.QtCore import QSettings, QTimer

    from kvscope_app.application import make_application
    from kvscope_app.command_line import Options
    from kvscope_app.desktop import Desktop
    from kvscope_app.recent_recordings.open_file import try_to_open

    app = make_application()
    desktop = Desktop(app, Options(theme="dark"), QSettings(f"{recording}.ini", QSettings.Format.IniFormat))
    first = desktop.open_window(endpoint)
    turns = itertools.cycle((lambda: desktop.attach(endpoint), lambda: try_to_open(first, recording)))
    is_awaited = False  # a recording opens on a thread, which takes its time on a busy machine

    def turn() -> None:
        nonlocal is_awaited
        others = [window for window in desktop.windows if window is not first]
        if others:
            is_awaited = False
            others[0].close()
        elif not is_awaited:
            is_awaited = True
            next(turns)()

    timer = QTimer(app)
    timer.timeout.connect(turn)
    timer.start(4000)
    clock = QTimer(app)
    clock.timeout.connect(lambda: _fill_and_tell(first.session))
    clock.start(60_000)
    code: int = app.exec()
    desktop.close()
    return code


def _fill_and_tell(session: Session) -> None:
    log = session.history.events
    while ENOUGH_EVENTS <= len(log) == log.last_serial:  # none was dropped so far
        events = [logged.event for logged in log.since(0, ENOUGH_EVENTS)]
        again = msgspec.msgpack.decode(msgspec.msgpack.encode(events), type=list[Event])  # objects of their own
        log.extend(again, session.history.epoch or 0, 0)
    print(f"{'':10}the window that stays keeps {len(log)} events, {len(session.mirror.requests)} requests", flush=True)


def _soak(folder: Path, seconds: float, model: str, draw: random.Random) -> int:
    os.chmod(folder, 0o700)
    endpoint, recording = f"ipc://{folder}/engine", folder / "run.mcap"
    module = [sys.executable, "-m", "kvscope_engine.cli.main"]
    simulated = [*module, "simulate", "sharegpt", "--requests", "60", "--record", str(recording)]
    subprocess.run(simulated, check=True, stdout=subprocess.DEVNULL)
    environment = os.environ | {"QT_QPA_PLATFORM": "offscreen", "XDG_DATA_HOME": str(folder / "data")}
    serve = ("serve", "--endpoint", endpoint, "--model", model, "--num-gpu-blocks-override", str(NUM_BLOCKS))
    engine = subprocess.Popen([*module, *serve], stdout=subprocess.DEVNULL)
    window = subprocess.Popen([sys.executable, __file__, "--desktop", endpoint, str(recording)], env=environment)
    try:
        _wait_for(endpoint)
        return _judge(_watch(endpoint, engine.pid, window.pid, seconds, draw))
    finally:
        for process in (window, engine):
            process.terminate()
        for process in (window, engine):
            process.wait(60)


def _wait_for(endpoint: str) -> None:
    from kvscope_telemetry import connect

    with connect(endpoint) as source:
        assert source.wait(lambda: source.position[0] is not None, 300), "the engine did not begin"


def _watch(
    endpoint: str, engine: int, window: int, seconds: float, draw: random.Random
) -> dict[str, list[tuple[float, Reading]]]:
    readings: dict[str, list[tuple[float, Reading]]] = {"engine": [], "desktop": []}
    started = time.monotonic()
    next_sample = next_line = 0.0
    num_clients = num_done = 0
    while (now := time.monotonic() - started) < seconds:
        num_done += _one_client(endpoint, num_clients, draw)
        num_clients += 1
        time.sleep(max(0.0, started + now + SECONDS_A_CLIENT - time.monotonic()))
        if now >= next_sample:
            next_sample = now + SAMPLE_S
            for name, pid in (("engine", engine), ("desktop", window)):
                readings[name].append((now, read_process(pid)))
        if now >= next_line:
            next_line = now + 60
            last = {name: of_one[-1][1] for name, of_one in readings.items()}
            print(f"{now / 60:5.1f} min, {num_clients} clients, {num_done} answers: {last}", flush=True)
    return readings


def _one_client(endpoint: str, number: int, draw: random.Random) -> int:
    """Comes, asks, waits or not, goes; how many answers it saw end."""
    from kvscope_telemetry import connect
    from kvscope_telemetry.messages.commands import Abort, Finished, Submit
    from kvscope_telemetry.messages.sampling_params import SamplingParams

    name, ends = f"soak-{number}", draw.choice(("waiting", "aborts", "leaves"))
    prompt = " ".join(draw.choices(WORDS.split(), k=draw.randrange(4, 60)))
    finished = 0
    with connect(endpoint) as source:
        sampling = SamplingParams(max_tokens=draw.randrange(1, 40), temperature=0.7, seed=number)
        source.send(Submit(request_id=name, prompt=prompt, sampling=sampling))

        def is_over() -> bool:
            nonlocal finished
            source.update_mirror()
            finished += sum(isinstance(reply, Finished) for reply in source.poll_replies())
            return finished > 0

        if ends == "waiting":
            source.wait(is_over, 60)
        else:
            source.wait(is_over, draw.random() * 0.5)
            if ends == "aborts":
                source.send(Abort(request_id=name))
                source.wait(is_over, 5)
    return finished


def _judge(readings: dict[str, list[tuple[float, Reading]]]) -> int:
    is_flat = True
    for name, of_one in readings.items():
        quarters = _quarters([reading for _, reading in of_one])
        resident_mib = [statistics.mean(reading.resident_mib for reading in quarter) for quarter in quarters]
        grown = resident_mib[3] / resident_mib[1] - 1
        print(f"{name}: resident memory a quarter {', '.join(f'{mib:.1f}' for mib in resident_mib)} MiB")
        least_mib = [min(reading.resident_mib for reading in quarter) for quarter in quarters]
        print(f"{name}: least resident memory a quarter {', '.join(f'{mib:.1f}' for mib in least_mib)} MiB")
        print(f"{name}: resident memory {grown:+.2%} from the second quarter to the last")
        is_flat &= abs(grown) <= MEMORY_TOLERANCE
        for field in ("num_descriptors", "num_threads"):
            fewest = [min(getattr(reading, field) for reading in quarter) for quarter in quarters]
            print(f"{name}: {field} a quarter {', '.join(map(str, fewest))}")
            is_flat &= fewest[3] == fewest[1]
    print("flat" if is_flat else "NOT flat")
    return 0 if is_flat else 1


def _quarters(readings: list[Reading]) -> list[list[Reading]]:
    ends = [index * len(readings) // 4 for index in range(5)]
    return [readings[first:last] for first, last in itertools.pairwise(ends)]


if __name__ == "__main__":
    sys.exit(main())
