"""Why events of the window waited: the processor was another's, the interpreter's lock was, or which task ran so long.

    python scripts/bench_causes.py --seconds 20

As `kvscope bench`: the real window with its ring on a busy synthetic engine, and knocks from another process. Of each
that waited longer than `--late-ms` the largest part is its cause. Linux alone tells how long a thread waited for a
processor. The watching itself takes some 2 % of a core.
"""

from __future__ import annotations

import argparse
import bisect
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from PySide6.QtCore import QAbstractEventDispatcher, QSocketNotifier

from kvscope_app.bench.bench_command import _desktop, _synthetic_engine
from kvscope_app.bench.event_loop import run_for, run_until
from kvscope_app.bench.prober import STAMP
from kvscope_app.session.history import History
from kvscope_app.session.session import Session
from kvscope_app.views.base import View
from kvscope_app.views.page_map.canvas import Canvas
from kvscope_app.window.refresher import Refresher
from kvscope_telemetry.state.mirror import Mirror

TASKS: tuple[tuple[type, str], ...] = ((Mirror, "apply"), (History, "add"), (Canvas, "paintEvent"))
AROUND: tuple[tuple[type, str], ...] = ((Session, "poll"), (Refresher, "run"), (Refresher, "_refresh_fast"))
"""Told as the cause where none of the tasks inside takes most of the time."""


@dataclass
class Watch:
    """What the GUI thread and the reading thread did, as they go by."""

    spans: list[tuple[int, int, str]] = field(default_factory=list)
    marks: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Time, processor time of this thread, how long it and the reading thread waited for a processor, ns."""
    knocks: list[tuple[int, int]] = field(default_factory=list)
    """Knocked, and heard."""

    def __post_init__(self) -> None:
        self._threads = [_schedstat(threading.get_native_id())]

    def mark(self) -> None:
        """How it stands now."""
        waited = [int(os.pread(fd, 64, 0).split()[1]) for fd in self._threads]
        self.marks.append((time.monotonic_ns(), time.thread_time_ns(), waited[0], sum(waited[1:])))

    def follow_reader(self) -> None:
        """From now on the reading thread as well."""
        readers = [thread.native_id for thread in threading.enumerate() if thread.name == "kvscope-reader"]
        self._threads += [_schedstat(number) for number in readers if number]

    def around(self, owner: type, name: str) -> None:
        """Note when this method runs on the GUI thread."""
        method, label = getattr(owner, name), f"{owner.__name__}.{name}"

        def watched(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                return method(*args, **kwargs)
            self.mark()
            began_ns = time.monotonic_ns()
            try:
                return method(*args, **kwargs)
            finally:
                self.spans.append((began_ns, time.monotonic_ns(), label))
                self.mark()

        setattr(owner, name, watched)

    def cause(self, knocked_ns: int, heard_ns: int) -> str:
        """The largest part of the time from one to the other."""
        begin = self.marks[max(0, bisect.bisect_right(self.marks, (knocked_ns,)) - 1)]
        end = self.marks[max(0, bisect.bisect_right(self.marks, (heard_ns + 1,)) - 1)]
        ran_ns, waited_ns = end[1] - begin[1], end[2] - begin[2]
        lock_ns = max(0, heard_ns - knocked_ns - ran_ns - waited_ns)
        reader_ns = min(lock_ns, end[3] - begin[3])
        parts = {
            "a processor": waited_ns,
            "the reading thread, which waited for a processor": reader_ns,
            "the interpreter's lock, or the display": lock_ns - reader_ns,
            self._longest(knocked_ns, heard_ns): ran_ns,
        }
        return max(parts, key=lambda name: parts[name])

    def _longest(self, knocked_ns: int, heard_ns: int) -> str:
        took: Counter[str] = Counter()
        for began_ns, ended_ns, label in self.spans:
            if ended_ns > knocked_ns and began_ns < heard_ns:
                took[label] += min(ended_ns, heard_ns) - max(began_ns, knocked_ns)
        around = {f"{owner.__name__}.{name}" for owner, name in AROUND}
        inner = Counter({label: ns for label, ns in took.items() if label not in around})
        for found in (inner, took):
            if found and found.most_common(1)[0][1] > (heard_ns - knocked_ns) / 3:
                return f"the task {found.most_common(1)[0][0]}"
        return "Qt's own painting"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--rate", type=float, default=5_000.0, help="frames per second")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--late-ms", type=float, default=5.0, help="what is late")
    args = parser.parse_args()
    args.host_blocks = args.disk_blocks = 0
    watch = Watch()
    with tempfile.TemporaryDirectory(prefix="kvscope-causes-") as folder:
        os.environ["XDG_CONFIG_HOME"] = folder
        os.mkdir(f"{folder}/engine", mode=0o700)
        endpoint = f"ipc://{folder}/engine/telemetry"
        with _synthetic_engine(endpoint, args), _desktop() as desktop:
            for owner, name in (*TASKS, *AROUND):
                watch.around(owner, name)
            window = desktop.open_window(endpoint)
            window.resize(1600, 900)
            run_until(window.views_loaded)
            for kind in {type(view) for view in window.findChildren(View)}:
                watch.around(kind, "refresh")
            watch.follow_reader()
            QAbstractEventDispatcher.instance().aboutToBlock.connect(watch.mark)
            run_for(2.0)
            _listen(watch, args.seconds)
            window.close()
    _tell(watch, round(args.late_ms * 1e6))


def _listen(watch: Watch, seconds: float) -> None:
    """Note knocks for so long."""
    command = (sys.executable, "-P", "-m", "kvscope_app.bench.prober")
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as prober:
        assert prober.stdout is not None, "a pipe"
        number = prober.stdout.fileno()

        def hear() -> None:
            watch.mark()
            data, now_ns = os.read(number, 512 * STAMP.size), time.monotonic_ns()
            watch.knocks += [(stamp, now_ns) for (stamp,) in STAMP.iter_unpack(data)]

        notifier = QSocketNotifier(number, QSocketNotifier.Type.Read)
        notifier.activated.connect(hear)
        run_for(seconds)
        notifier.setEnabled(False)
        prober.kill()


def _tell(watch: Watch, late_ns: int) -> None:
    late = [knock for knock in watch.knocks if knock[1] - knock[0] > late_ns]
    print(f"{len(late)} of {len(watch.knocks)} events waited longer than {late_ns / 1e6:g} ms, most of it for")
    causes = Counter(watch.cause(*knock) for knock in late)
    longest: dict[str, int] = {}
    for knock in late:
        cause = watch.cause(*knock)
        longest[cause] = max(longest.get(cause, 0), knock[1] - knock[0])
    for cause, count in causes.most_common():
        print(f"{count:6}  {cause} (longest {longest[cause] / 1e6:.1f} ms)")


def _schedstat(thread: int) -> int:
    return os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY)


if __name__ == "__main__":
    main()
