"""Regenerates the pictures in docs/ from the sample recording, three simulations, and a real engine under load.

    python scripts/make_pictures.py            # all pictures
    python scripts/make_pictures.py compare    # only the picture with that name

Needs no display: windows are rendered on Qt's offscreen platform, with temporary settings. For the pictures `window`
and `debugger`, the script starts, loads and stops an engine. Apart from the engine's measurements, the pictures show
nothing of the machine.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from PySide6.QtGui import QImage
    from PySide6.QtWidgets import QWidget

    from kvscope_app.desktop import Desktop
    from kvscope_app.ui.theme import Theme
    from kvscope_app.window.main_window import MainWindow

DOCS: Final = Path(__file__).resolve().parent.parent / "docs" / "pictures"
WINDOW_VIEWS: Final = {
    "timeline": (28.0, (1100, 660)),
    "heatmap": (28.0, (960, 420)),
    "prefixes": (20.0, (1120, 394)),
}
"""Views of the sample recording of which pictures are made with their toolbars: (time in seconds, size in pixels)."""
EXPORT_ARGUMENTS: Final = {
    "tiers.png": ("--view", "page-map", "--at", "24", "--size", "900x440"),
    "what-if.png": ("--view", "what-if", "--at", "24", "--size", "960x450"),
    "page-map.webp": ("--to", "video", "--view", "page-map", "--speed", "4", "--fps", "8", "--size", "760x400"),
}
PREFIX, OTHER, THIRD = 0, 1, 2
EVICTION_REQUESTS: Final = (
    (0, 512, 16, (PREFIX,)),
    (4200, 608, 16, (PREFIX,)),
    (7200, 864, 12, (OTHER, THIRD)),
    (12400, 608, 14, (PREFIX,)),
)
"""Requests in the animation made by `eviction`: (arrival in ms, prompt tokens, output tokens, ids of the texts
at the start of the prompt).
"""
CAPTIONS: Final = (
    ("A request fills blocks with its prompt, then answers.", "It is done. What it computed stays in the cache."),
    (
        "A prompt with the same beginning: its blocks are found, not computed again.",
        "Done. No request uses the prefix.",
    ),
    ("A large request needs room: the cached prefix is evicted, block by block.", "Only its first blocks are left."),
    ("The prefix is wanted again: what is left is found, the rest is computed anew.", "Done."),
)
"""Captions of the animation for each request in `EVICTION_REQUESTS`: (while it runs, after it)."""
EVICTION_OPTIONS: Final = (
    *("--num-gpu-blocks-override", "60", "--max-num-batched-tokens", "32", "--max-model-len", "1024"),
    *("--step-overhead-ms", "80"),
)
EVICTION_FPS, EVICTION_SPEED = 12, 2.0
CAPTION_HEIGHT: Final = 46
SIMULATION_OPTIONS: Final = (
    *("--requests", "120", "--num-gpu-blocks-override", "600", "--model-preset", "opt-13b"),
    *("--shared-prefix", "0", "--seed", "3"),
)
ENGINE_OPTIONS: Final = (
    *("--model", "default", "--device", "cpu", "--num-gpu-blocks-override", "96", "--max-model-len", "2048"),
    *("--kv-host-memory", "24MiB", "--kv-disk", "32MiB", "--preemption", "swap"),
)
WINDOW_SIZE: Final = (1440, 900)
SCREEN: Final = {"name": "screen", "x": 0, "y": 0, "width": 1920, "height": 1080, "dpr": 1, "logicalDpi": 96}
LOAD_DURATION_S: Final = 40.0
TIMEOUT_S: Final = 600.0


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the pictures in docs/.")
    parser.add_argument("names", nargs="*", help="without the suffix (default: all)")
    wanted = set(parser.parse_args().names)
    makers: dict[str, Callable[[Path], None]] = {
        **dict.fromkeys(WINDOW_VIEWS, views),
        **{Path(name).stem: _export_maker(name) for name in EXPORT_ARGUMENTS},
        "eviction": eviction,
        "compare": compare,
        "recordings": recordings,
        "plan": plan,
        "window": live_window,
        "debugger": live_window,
    }
    if unknown := wanted - set(makers):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(makers)}")
    with tempfile.TemporaryDirectory(prefix="kvscope-pictures-") as folder:
        screens = Path(folder) / "screens.json"
        screens.write_text(json.dumps({"screens": [SCREEN]}), "utf-8")
        os.environ["QT_QPA_PLATFORM"] = f"offscreen:configfile={screens}"
        for kind in ("CONFIG", "DATA"):
            os.environ[f"XDG_{kind}_HOME"] = f"{folder}/{kind.lower()}"
        for make in dict.fromkeys(make for name, make in makers.items() if not wanted or name in wanted):
            make(Path(folder))
    return 0


def _export_maker(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        path = folder / name
        subprocess.run(
            [_program("kvscope"), "export", "sample", "--out", str(path), *EXPORT_ARGUMENTS[name]], check=True
        )
        path.replace(DOCS / name)

    return make


def views(folder: Path) -> None:
    with open_desktop(folder, "dark") as desktop:
        from kvscope_telemetry.recordings.reader import Recording
        from kvscope_telemetry.recordings.sample import sample_recording

        window = desktop.open_recording(Recording.open(sample_recording()), 0.0)
        prepare(window)
        wait_until(lambda: window.session.is_overview_complete)
        begin_ns = window.session.timeline.range_ns[0]
        for name, (at_s, size) in WINDOW_VIEWS.items():
            window.session.timeline.go_to(begin_ns + round(at_s * 1e9))
            dock = window.docks[name]
            dock.setFloating(True)
            dock.show()
            window.focus_view(name)
            window.views[name].setMinimumSize(*size)
            dock.resize(*size)
            run_event_loop(3.0)
            if name == "prefixes":
                window.views[name].model.set_all_expanded(True)
            window.setFocus()
            run_event_loop(1.0)
            save_picture(window.views[name], f"{name}.png")


def eviction(folder: Path) -> None:
    """Make an animation of the page map in which a prefix is cached, hit, evicted and requested again."""
    from PIL import Image
    from PySide6.QtCore import QSize

    from kvscope_app.media_export.offscreen_view import OffscreenView, offscreen_application
    from kvscope_app.media_export.picture import PictureStyle, png_of
    from kvscope_app.ui.theme import DARK
    from kvscope_telemetry.recordings.reader import Recording

    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    trace, path = folder / "trace.jsonl", folder / "eviction.mcap"
    trace.write_text(
        "".join(json.dumps(dict(zip(keys, line, strict=True))) + "\n" for line in EVICTION_REQUESTS), "utf-8"
    )
    command = [_program("kvscope-engine"), "simulate", str(trace), "--record", str(path), *EVICTION_OPTIONS]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    times = folder / "requests.csv"
    command = [_program("kvscope"), "export", str(path), "--kind", "requests", "--out", str(times)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    offscreen_application()
    recording = Recording.open(path)
    changes = list(_captions(times))
    stage = OffscreenView(recording, "page-map", QSize(800, 340), DARK)
    frames = []
    try:
        stage.go_to(0.0)
        length_s = (recording.end_ns - recording.start_ns) / 1e9
        for number in range(round(length_s / EVICTION_SPEED * EVICTION_FPS) + 1):
            at_s = min(number / EVICTION_FPS * EVICTION_SPEED, length_s)
            stage.now_ns = round(number / EVICTION_FPS * 1e9)
            stage.play_to(at_s)
            caption = [command for from_s, command in changes if from_s <= at_s][-1]
            frames.append(Image.open(io.BytesIO(png_of(_captioned(stage.picture(PictureStyle()), caption, DARK)))))
    finally:
        stage.close()
    durations = [1000 // EVICTION_FPS] * len(frames)
    durations[-1] = 1500
    path_out = DOCS / "eviction.webp"
    frames[0].save(
        path_out, save_all=True, append_images=frames[1:], duration=durations, loop=0, lossless=True, method=6
    )
    print(path_out)


def _captions(requests: Path) -> Iterator[tuple[float, str]]:
    with requests.open(encoding="utf-8", newline="") as file:
        for number, (row, (during, after)) in enumerate(zip(csv.DictReader(file), CAPTIONS, strict=True), 1):
            arrival_s = float(row["arrival_s"])
            yield arrival_s, f"{number}   {during}"
            yield arrival_s + int(row["total_ns"]) / 1e9, f"     {after}"


def _captioned(image: QImage, caption: str, theme: Theme) -> QImage:
    from PySide6.QtCore import QRect, Qt
    from PySide6.QtGui import QColor, QImage, QPainter

    from kvscope_app.ui.fonts import sans

    result = QImage(image.width(), image.height() + CAPTION_HEIGHT, QImage.Format.Format_RGB32)
    result.fill(QColor(theme.panel))
    painter = QPainter(result)
    painter.drawImage(0, 0, image)
    painter.fillRect(0, image.height(), image.width(), CAPTION_HEIGHT, QColor(theme.raised))
    painter.setFont(sans(1.25))
    painter.setPen(QColor(theme.text))
    line = QRect(16, image.height(), image.width() - 32, CAPTION_HEIGHT)
    painter.drawText(line, Qt.AlignmentFlag.AlignVCenter | Qt.TextFlag.TextDontClip, caption)
    painter.end()
    return result


def compare(folder: Path) -> None:
    a, b = simulated_recordings(folder)
    with open_desktop(folder, "dark") as desktop:
        from kvscope_telemetry.recordings.reader import Recording

        window = desktop.compare(Recording.open(a), Recording.open(b))
        window.resize(*WINDOW_SIZE)
        pair = window.pair
        wait_until(lambda: all(len(session.overview) and session.is_overview_complete for session in (pair.a, pair.b)))
        pair.go_to(pair.origin_ns + 14_500_000_000)
        run_event_loop(2.0)
        window.refresh_overview()
        save_picture(window, "compare.png")


def recordings(folder: Path) -> None:
    """Make the picture of the recordings window for a folder with two simulations and a copy of the sample."""
    from importlib import resources

    simulated_recordings(folder)
    sample = folder / "under-pressure.mcap"
    sample.write_bytes((resources.files("kvscope_resources") / "sample.mcap").read_bytes())
    with open_desktop(folder, "dark") as desktop:
        from kvscope_app.recent_recordings.recordings_window import show_recordings
        from kvscope_telemetry.recordings.reader import Recording

        desktop.themes.settings.change(recording_folder=str(folder))
        recordings_window = show_recordings(desktop.open_recording(Recording.open(sample)))
        recordings_window.folder.setText("/home/ada/recordings")  # instead of the temporary folder's path
        recordings_window.resize(1240, 420)
        run_event_loop(6.0)
        save_picture(recordings_window, "recordings.png")


def plan(folder: Path) -> None:
    """Make the picture of the dialog "Plan memory" for the default model on a GPU of 24 GiB."""
    with open_desktop(folder, "dark") as desktop:
        from kvscope_app.planning.plan_dialog import PlanDialog
        from kvscope_telemetry.recordings.reader import Recording
        from kvscope_telemetry.recordings.sample import sample_recording

        window = desktop.open_recording(Recording.open(sample_recording()), 0.0)
        prepare(window)
        answers: list[object] = []
        window.plans.answered.connect(answers.append)
        dialog = PlanDialog(window, window.themes.theme, "default", window.plans)
        dialog.show()
        dialog.resize(1080, 560)
        dialog.setFocus()
        wait_until(lambda: len(answers) == 2)
        run_event_loop(2.0)
        save_picture(dialog, "plan.png")


def live_window(folder: Path) -> None:
    """Make pictures of a window under load, and of the same window in the light theme with the engine paused."""
    socket = folder / "engine"
    socket.mkdir()
    command = [_program("kvscope-engine"), "serve", "--endpoint", f"ipc://{socket}/telemetry", *ENGINE_OPTIONS]
    engine = subprocess.Popen(command, start_new_session=True)
    try:
        with open_desktop(folder, "dark") as desktop:
            desktop.attach(f"ipc://{socket}/telemetry")
            window = desktop.windows[-1]
            prepare(window)
            _start_load(window)
            run_event_loop(LOAD_DURATION_S)
            _send_prompt(window, "Why is the sky blue? One sentence.")
            run_event_loop(6.0)
            window.alarm_strip.hide()  # it covers the page map
            save_picture(window, "window.png")
            desktop.themes.choose("light")
            window.actions_by_name["pause_engine"].trigger()
            run_event_loop(5.0)
            numbers, states = window.session.mirror.requests.number, window.session.mirror.requests.state
            running = [int(number) for number, state in zip(numbers, states, strict=True) if state == 1]
            window.session.selection.select_request(
                max(running, key=lambda n: len(window.session.mirror.requests.table(n)))
            )
            run_event_loop(2.0)
            window.alarm_strip.hide()
            save_picture(window, "debugger.png")
            window.actions_by_name["resume"].trigger()
            run_event_loop(1.0)
    finally:
        engine.send_signal(signal.SIGTERM)
        engine.wait(60.0)


def prepare(window: MainWindow) -> None:
    """Wait for all views of a window, resize it for the picture, and open the console."""
    wait_until(lambda: set(window.docks) <= set(window.views) and window.session.mirror.num_blocks > 0)
    window.resize(*WINDOW_SIZE)
    window.focus_view("requests")
    window.focus_view("console")
    run_event_loop(2.0)


def _start_load(window: MainWindow) -> None:
    from kvscope_app.views.console.load_view import LoadView

    load = window.findChild(LoadView)
    wait_until(lambda: load.button.isEnabled())
    load.toggle()


def _send_prompt(window: MainWindow, prompt: str) -> None:
    from PySide6.QtCore import Qt
    from PySide6.QtTest import QTest

    from kvscope_app.views.console.composer import PromptEdit

    window.focus_view("console")
    line = window.findChild(PromptEdit)
    line.setPlainText(prompt)
    QTest.keyClick(line, Qt.Key.Key_Return)


def simulated_recordings(folder: Path) -> tuple[Path, Path]:
    """Return recordings of simulations with 120 requests on 600 blocks: (paged, contiguous)."""
    paths = folder / "paged.mcap", folder / "contiguous.mcap"
    for path in paths:
        if not path.exists():
            arguments = ["simulate", "sharegpt", "--allocator", path.stem, "--record", str(path), *SIMULATION_OPTIONS]
            subprocess.run([_program("kvscope-engine"), *arguments], check=True, stdout=subprocess.DEVNULL)
    return paths


@contextmanager
def open_desktop(folder: Path, theme: str) -> Iterator[Desktop]:
    """Yield a desktop with temporary settings, and close it at the end."""
    from PySide6.QtCore import QCoreApplication, QSettings

    from kvscope_app.application import make_application
    from kvscope_app.command_line import Options
    from kvscope_app.desktop import Desktop

    app = QCoreApplication.instance() or make_application()
    desktop = Desktop(app, Options(theme=theme), QSettings(str(folder / "s.ini"), QSettings.Format.IniFormat))  # type: ignore[arg-type]
    try:
        yield desktop
    finally:
        for window in list(desktop.windows):
            window.close()
        desktop.close()
        run_event_loop(0.5)


def run_event_loop(seconds: float) -> None:
    from PySide6.QtCore import QCoreApplication

    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        QCoreApplication.processEvents()
        time.sleep(0.005)


def wait_until(condition: Callable[[], object]) -> None:
    """Process Qt events until `condition()` is true. Raises TimeoutError after `TIMEOUT_S` seconds."""
    end_s = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError("what the picture is to show did not come about")
        run_event_loop(0.05)


def save_picture(widget: QWidget, name: str) -> None:
    widget.grab().save(str(DOCS / name))
    print(DOCS / name)


def _program(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


if __name__ == "__main__":
    sys.exit(main())
