"""Measure design decisions against the alternatives that were rejected.

Each case prints processor time or memory of both sides; docs/internals/decisions/ quotes the results. The cases are
small and the sides are not interleaved: on a busy machine, only differences by a factor of several are significant.
"""

from __future__ import annotations

import argparse
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import zmq
import zstandard
from tests.simulated_engine.engine import SimulatedEngine

from benchmarks.command_line import run_benchmark
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.ledger import COLUMNS, BlockState, Ledger
from kvscope_telemetry.messages.wire import encode
from kvscope_telemetry.mirror.coalesce import coalesce
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.recordings.chunks import MAGIC
from kvscope_telemetry.recordings.frame_batch import pack_frames
from kvscope_telemetry.recordings.layout import CHUNK_BYTES
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.transport.server_sockets import PUBLISH_HIGH_WATER

_MIB: Final = 1 << 20
_SIZE: Final = (1200, 800)
_SUBSCRIBER: Final = """
import sys, time, zmq
socket = zmq.Context().socket(zmq.SUB)
socket.subscribe(b"")
socket.connect(sys.argv[1])
print("connected", flush=True)
time.sleep(600)
"""
_STOCK_READER: Final = """
import sys
from mcap.stream_reader import StreamReader
for record in StreamReader(open(sys.argv[1], "rb")).records:
    pass
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"{', '.join(CASES)} (default: all)")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the blocks and messages (default: 1)")


def run(args: argparse.Namespace) -> int:
    """Measure the chosen cases and print a line for each side. Raises BadInput for an unknown case."""
    if unknown := [case for case in args.cases if case not in CASES]:
        raise BadInput(f"there is no case {unknown[0]}; there are {', '.join(CASES)}")
    for case in args.cases or CASES:
        CASES[case](args.scale)
    return 0


def measure_ledger(scale: float) -> None:
    """Change 1 % of the ledger rows, stored in numpy columns and in one Python object per block."""
    num_blocks = int(1_000_000 * scale)
    ledger = Ledger(num_blocks)
    ids = np.random.default_rng(0).choice(num_blocks, num_blocks // 100, replace=False)
    columns = {name: getattr(ledger, name) for name in COLUMNS}
    changed = {name: np.ones(ids.size, column.dtype) for name, column in columns.items()}

    def apply_columns() -> None:
        for name, column in columns.items():
            column[ids] = changed[name]

    row_type: Any = type("Row", (), {"__slots__": tuple(columns)})
    before_bytes = _resident_bytes()
    objects = [row_type() for _ in range(num_blocks)]
    for row in objects:
        for name in columns:
            setattr(row, name, 0)
    object_bytes = _resident_bytes() - before_bytes
    positions, values = ids.tolist(), [column.tolist() for column in changed.values()]

    def apply_objects() -> None:
        for position, row_values in zip(positions, zip(*values, strict=True), strict=True):
            for name, value in zip(columns, row_values, strict=True):
                setattr(objects[position], name, value)

    row_bytes = sum(column.itemsize for column in columns.values())
    for side, apply, count, num_bytes in (
        ("columns", apply_columns, lambda: np.count_nonzero(ledger.state == BlockState.ACTIVE), row_bytes),
        ("objects", apply_objects, lambda: sum(row.state == 1 for row in objects), object_bytes / num_blocks),
    ):
        apply_ms, count_ms = _min_us(apply, 5) / 1e3, _min_us(count, 5) / 1e3
        print(f"ledger: {side}: {apply_ms:.1f} ms a change, {count_ms:.1f} ms to count, {num_bytes:.0f} bytes a row")


class _Packed(msgspec.Struct):
    ids: bytes


class _Listed(msgspec.Struct):
    ids: list[int]


def measure_packing(scale: float) -> None:
    """Encode and decode block ids, as packed bytes and as a MessagePack list of integers."""
    ids = np.arange(int(16_384 * scale), dtype="<u4")
    packed, listed = msgspec.msgpack.Decoder(_Packed), msgspec.msgpack.Decoder(_Listed)
    pack = msgspec.msgpack.encode
    packed_data, listed_data = pack(_Packed(ids.tobytes())), pack(_Listed(ids.tolist()))
    sides: tuple[tuple[str, Callable[[], object], Callable[[], object], bytes], ...] = (
        (
            "packed",
            lambda: pack(_Packed(ids.tobytes())),
            lambda: np.frombuffer(packed.decode(packed_data).ids, "<u4"),
            packed_data,
        ),
        (
            "list",
            lambda: pack(_Listed(ids.tolist())),
            lambda: np.array(listed.decode(listed_data).ids, "<u4"),
            listed_data,
        ),
    )
    for side, write, read, data in sides:
        print(f"packing: {side}: encode {_min_us(write):.1f} us, decode {_min_us(read):.1f} us, {len(data)} bytes")


def measure_subscriber(scale: float) -> None:
    """Publish to a subscriber whose process is stopped, with and without a high-water mark."""
    data = os.urandom(4096)
    for high_water in (PUBLISH_HIGH_WATER, 0):
        with (
            tempfile.TemporaryDirectory(prefix="kvscope-bench-") as folder,
            zmq.Context() as context,
            context.socket(zmq.PUB) as publisher,
        ):
            publisher.sndhwm, publisher.linger = high_water, 0
            endpoint = f"ipc://{folder}/telemetry"
            publisher.bind(endpoint)
            program = [sys.executable, "-c", _SUBSCRIBER, endpoint]
            with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as subscriber:
                assert subscriber.stdout is not None
                subscriber.stdout.readline()
                time.sleep(0.5)  # for its subscription to arrive
                subscriber.send_signal(signal.SIGSTOP)
                before_bytes = _resident_bytes()
                times_ns = [_send_ns(publisher, data) for _ in range(int(50_000 * scale))]
                time.sleep(0.3)  # for ZeroMQ's thread to take what is queued
                held_mib = (_resident_bytes() - before_bytes) / _MIB
                subscriber.kill()
        p50, p99 = np.quantile(times_ns, (0.5, 0.99)) / 1e3
        print(
            f"subscriber: high-water mark {high_water}: {held_mib:.0f} MiB more, send p50 {p50:.1f}, p99 {p99:.0f} us"
        )


def _send_ns(publisher: zmq.Socket[bytes], data: bytes) -> int:
    began_ns = time.perf_counter_ns()
    publisher.send(data)
    return time.perf_counter_ns() - began_ns


def measure_coalescing(scale: float) -> None:
    """Apply frames to the mirror of a million blocks, one at a time and coalesced into larger updates."""
    engine = SimulatedEngine(num_blocks=int(1_000_000 * scale))
    snapshot = engine.snapshot()
    frames = [engine.advance() for _ in range(int(2_560 * scale))]
    for num_joined in (1, 80, 512):
        mirror = Mirror()
        mirror.apply(coalesce([], snapshot=snapshot))
        began_ns = time.process_time_ns()
        for first in range(0, len(frames), num_joined):
            mirror.apply(coalesce(frames[first : first + num_joined]))
        frame_us = (time.process_time_ns() - began_ns) / len(frames) / 1e3
        print(f"coalescing: {num_joined} frames an update: {frame_us:.1f} us a frame")


def measure_history(scale: float) -> None:
    """Pack the frames of one second at 5,000 frames/s in chunks, in the way the recent history of a live
    session is written.
    """
    engine = SimulatedEngine(num_blocks=int(1_000_000 * scale))
    frames = [engine.advance() for _ in range(int(5_000 * scale))]
    num_in_chunk = max(1, CHUNK_BYTES * len(frames) // sum(len(encode(frame)) for frame in frames))
    timed = [(frame.time_ns, frame) for frame in frames]

    def pack_all() -> None:
        for first in range(0, len(timed), num_in_chunk):
            chunk = timed[first : first + num_in_chunk]
            pack_frames(chunk, [0] * len(chunk))

    print(f"history: {len(frames)} frames, {num_in_chunk} a chunk, packed in {_min_us(pack_all, 1) / 1e3:.0f} ms")


def measure_bomb(scale: float) -> None:
    """Open a small recording with a chunk that decompresses to 512 MiB, with kvscope and, for 10 s, with the mcap
    package.
    """
    num_bytes = int(512 * scale) * _MIB
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(num_bytes))
    chunk = struct.pack("<QQQI", 0, 1, num_bytes, 0) + struct.pack("<I", 4) + b"zstd"
    chunk += struct.pack("<Q", len(bomb)) + bomb
    with tempfile.TemporaryDirectory(prefix="kvscope-bench-") as folder:
        path = Path(folder) / "bomb.mcap"
        path.write_bytes(MAGIC + struct.pack("<BQ", 6, len(chunk)) + chunk)
        before_bytes = _resident_bytes()
        began_ns = time.process_time_ns()
        try:
            Recording.open(path)
        except BadInput as error:
            print(f"bomb: {error}")
        took_ms = (time.process_time_ns() - began_ns) / 1e6
        held_mib = (_resident_bytes() - before_bytes) / _MIB
        print(f"bomb: a file of {path.stat().st_size} bytes; kvscope: {took_ms:.1f} ms, {held_mib:.0f} MiB more")
        with subprocess.Popen([sys.executable, "-c", _STOCK_READER, str(path)]) as reader:
            peak_bytes, until_s = 0, time.monotonic() + 10 * scale
            while reader.poll() is None and time.monotonic() < until_s:
                peak_bytes = max(peak_bytes, _resident_bytes(reader.pid))
                time.sleep(0.05)
            end = "still reading" if reader.poll() is None else "at its end"
            reader.kill()
        print(f"bomb: mcap: {peak_bytes / _MIB:.0f} MiB, {end}")


def measure_page_map(scale: float) -> None:
    """Paint a page map in which 1 % of the blocks changed, as one image and as one graphics item per block."""
    from PySide6.QtCore import QRect, QRectF, Qt
    from PySide6.QtGui import QBrush, QColor, QImage, QPainter, QPaintEvent
    from PySide6.QtWidgets import QGraphicsRectItem, QGraphicsScene, QGraphicsView, QWidget

    app = _offscreen_application()
    random = np.random.default_rng(0)
    colors = np.array([0xFF202020, 0xFF30A030, 0xFFA03030, 0xFF3030A0], np.uint32)
    num_blocks = int(1_000_000 * scale)
    side = int(np.ceil(num_blocks**0.5))
    pixels = np.full(side * side, colors[0], np.uint32)
    image = QImage(pixels.data, side, side, side * 4, QImage.Format.Format_RGB32)

    class ImageMap(QWidget):
        def paintEvent(self, event: QPaintEvent) -> None:
            with QPainter(self) as painter:
                painter.drawImage(QRect(0, 0, *_SIZE), image)

    widget = ImageMap()
    widget.resize(*_SIZE)
    widget.show()
    app.processEvents()

    def paint_image() -> None:
        ids = random.integers(0, num_blocks, num_blocks // 100)
        pixels[ids] = colors[random.integers(0, colors.size, ids.size)]
        widget.repaint()

    print(f"page map: image of {num_blocks} blocks: {_median_us(paint_image, 31) / 1e3:.1f} ms a frame")
    widget.close()

    num_items = num_blocks // 10
    scene, brushes = QGraphicsScene(), [QBrush(QColor.fromRgb(int(color) & 0xFFFFFF)) for color in colors]
    items, columns = [], int(np.ceil(num_items**0.5))
    width, height = _SIZE[0] / columns, _SIZE[1] / columns
    for number in range(num_items):
        item = QGraphicsRectItem(QRectF(number % columns * width, number // columns * height, width, height))
        item.setPen(Qt.PenStyle.NoPen)
        scene.addItem(item)
        items.append(item)
    view = QGraphicsView(scene)
    view.resize(*_SIZE)
    view.show()
    app.processEvents()

    def paint_items() -> None:
        for number in random.integers(0, num_items, num_items // 100).tolist():
            items[number].setBrush(brushes[number % len(brushes)])
        app.processEvents()

    print(f"page map: {num_items} items: {_median_us(paint_items, 5) / 1e3:.1f} ms a frame")
    view.close()


def measure_curves(scale: float) -> None:
    """Draw ten curves of 100,000 points with pyqtgraph, complete and after kvscope's decimation to the plot's
    pixels.
    """
    import pyqtgraph as pg  # type: ignore[import-untyped]

    from kvscope_app.views.chart.curves import decimate

    app = _offscreen_application()
    plot = pg.PlotWidget()
    plot.resize(*_SIZE)
    plot.show()
    curves = [plot.plot(pen=pg.mkPen(pg.intColor(number)), skipFiniteCheck=True) for number in range(10)]
    x = np.arange(100_000 * scale)
    values = [np.random.default_rng(number).normal(size=x.size).cumsum() for number in range(10)]

    def draw(prepare: Callable[[Any, Any], tuple[Any, Any]]) -> None:
        for curve, y in zip(curves, values, strict=True):
            curve.setData(*prepare(x, y))
        app.processEvents()
        plot.grab()

    whole_ms = _median_us(lambda: draw(lambda x, y: (x, y)), 9) / 1e3
    decimated_ms = _median_us(lambda: draw(lambda x, y: decimate(x, y, _SIZE[0])), 9) / 1e3
    print(f"curves: all points {whole_ms:.1f} ms a frame, decimated {decimated_ms:.1f} ms")
    plot.close()


def _offscreen_application() -> Any:
    from PySide6.QtWidgets import QApplication

    os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
    return QApplication.instance() or QApplication([])


def _times_us(action: Callable[[], object], repeats: int) -> list[float]:
    times_us = []
    for _ in range(repeats):
        began_ns = time.process_time_ns()
        action()
        times_us.append((time.process_time_ns() - began_ns) / 1e3)
    return sorted(times_us)


def _min_us(action: Callable[[], object], repeats: int = 200) -> float:
    return _times_us(action, repeats)[0]


def _median_us(action: Callable[[], object], repeats: int) -> float:
    return _times_us(action, repeats)[repeats // 2]


def _resident_bytes(pid: int | None = None) -> int:
    statm = Path(f"/proc/{pid or os.getpid()}/statm").read_text("ascii").split()
    return int(statm[1]) * os.sysconf("SC_PAGE_SIZE") if len(statm) > 1 else 0


CASES: Final[dict[str, Callable[[float], None]]] = {
    "ledger": measure_ledger,
    "packing": measure_packing,
    "subscriber": measure_subscriber,
    "coalescing": measure_coalescing,
    "history": measure_history,
    "bomb": measure_bomb,
    "page-map": measure_page_map,
    "curves": measure_curves,
}
"""Measuring function by the name of the case on the command line. The function's argument is the scale."""


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__, add_arguments, run))
