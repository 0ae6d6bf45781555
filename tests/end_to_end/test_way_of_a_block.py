"""A block passes a limited number of files from its allocation to its pixel in the page map: a real run is traced.

A pool allocates a block, a frame with it is sent over real sockets, a session applies it and the page map draws it. A
file counts if it passes the block on: without it the pixel would not change. Code that uses the same frame for other
purposes, or checks it on the way, does not count. Start-up, other views and timers are not in the run.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

import numpy as np
from pytestqt.qtbot import QtBot
from tests.app.conftest import qapp_args  # noqa: F401
from tests.ways import Trace, check_way

from kvscope_app.session.session import Session
from kvscope_app.ui.theme import DARK
from kvscope_app.views.page_map.page_map_view import PageMapView
from kvscope_engine.policy.allocation.allocators import make_allocation
from kvscope_engine.policy.kv_cache.block_pool import BlockPool
from kvscope_engine.policy.scheduling.scheduler import Scheduler, SchedulerConfig
from kvscope_engine.step_recorder import StepRecorder
from kvscope_telemetry import LiveSource, SourceState
from kvscope_telemetry.messages.commands import Command, GetSnapshot, GetStatus, Status
from kvscope_telemetry.messages.telemetry import CacheInfo, DeviceInfo, Heartbeat, Hello, ModelInfo
from kvscope_telemetry.transport.server_sockets import ServerSockets

WAY: Final = (
    "engine/kvscope_engine/policy/kv_cache/block_pool.py",
    "engine/kvscope_telemetry/ledger.py",
    "engine/kvscope_telemetry/producer/frame_builder.py",
    "engine/kvscope_telemetry/transport/server_sockets.py",
    "engine/kvscope_telemetry/messages/wire.py",
    "engine/kvscope_telemetry/transport/client_sockets.py",
    "engine/kvscope_telemetry/sources/live_source.py",
    "engine/kvscope_telemetry/sources/live_reader.py",
    "engine/kvscope_telemetry/mirror/sync.py",
    "engine/kvscope_telemetry/mirror/coalesce.py",
    "app/kvscope_app/session/session.py",
    "app/kvscope_app/session/source_timeline.py",
    "engine/kvscope_telemetry/mirror/mirror.py",
    "app/kvscope_app/views/page_map/page_map_view.py",
    "app/kvscope_app/views/page_map/drawing/scene.py",
    "app/kvscope_app/views/page_map/drawing/cells.py",
    "app/kvscope_app/views/page_map/drawing/grid.py",
    "app/kvscope_app/views/page_map/color_modes.py",
    "app/kvscope_app/views/page_map/page_map_canvas.py",
)
BESIDE: Final = {
    "app/kvscope_app/session/event_log.py": "events of the same frame",
    "app/kvscope_app/session/history.py": "charts",
    "app/kvscope_app/session/latency_window.py": "charts",
    "app/kvscope_app/session/poll_timer.py": "how often is looked",
    "app/kvscope_app/session/request_times.py": "times of requests",
    "app/kvscope_app/session/session_requests.py": "all requests of the session",
    "app/kvscope_app/views/page_map/drawing/block_numbers.py": "what is written beside the cells",
    "app/kvscope_app/views/page_map/drawing/flash_kinds.py": "what lights up for a moment",
    "app/kvscope_app/views/page_map/drawing/flashes.py": "what lights up for a moment",
    "engine/kvscope_engine/policy/kv_cache/changed_rows.py": "which rows changed",
    "engine/kvscope_engine/policy/kv_cache/eviction_order.py": "which block is evicted next",
    "engine/kvscope_engine/policy/kv_cache/free_list.py": "which block is handed out next",
    "engine/kvscope_engine/policy/kv_cache/move_log.py": "blocks that changed places",
    "engine/kvscope_engine/policy/ranked_queue.py": "requests that run and wait are counted",
    "engine/kvscope_engine/policy/scheduling/change_log.py": "requests and events of the same frame",
    "engine/kvscope_engine/policy/scheduling/waiting_forks.py": "requests that wait are counted",
    "engine/kvscope_engine/policy/scheduling/scheduler.py": "requests and events of the same frame",
    "engine/kvscope_engine/policy/waiting_queue.py": "requests that run and wait are counted",
    "engine/kvscope_engine/step_recorder.py": "requests and counters of the same frame",
    "engine/kvscope_telemetry/credentials/": "who may ask",
    "engine/kvscope_telemetry/messages/message_size.py": "what waits is bounded by its size",
    "engine/kvscope_telemetry/messages/roles.py": "who may ask",
    "engine/kvscope_telemetry/messages/telemetry.py": "figures of the same frame",
    "engine/kvscope_telemetry/messages/unknown.py": "words of a later version",
    "engine/kvscope_telemetry/messages/validity.py": "what comes is checked",
    "engine/kvscope_telemetry/running_time.py": "when the engine stood still",
    "engine/kvscope_telemetry/transport/unreachable_engine.py": "why nobody would answer",
    "engine/kvscope_telemetry/transport/authenticator.py": "who may ask",
    "engine/kvscope_telemetry/transport/connection_watch.py": "what a connection may send is bounded",
    "engine/kvscope_telemetry/transport/reply_sender.py": "answers",
    "engine/kvscope_telemetry/transport/socket_watch.py": "sockets that wait to be read",
    "engine/kvscope_telemetry/transport/wakeup.py": "the other thread is woken",
    "engine/kvscope_telemetry/source.py": "whether an update is more than a sign of life",
    "engine/kvscope_telemetry/sources/liveness.py": "signs of life",
    "engine/kvscope_telemetry/sources/reply_queue.py": "answers wait to be taken",
    "engine/kvscope_telemetry/sources/sink.py": "recordings",
    "engine/kvscope_telemetry/mirror/state_continuity.py": "which frame comes next",
    "engine/kvscope_telemetry/mirror/engine_clock.py": "whether the frame's time is the engine's",
    "engine/kvscope_telemetry/mirror/extras.py": "what comes beside frames",
    "engine/kvscope_telemetry/mirror/request_mirror.py": "requests of the same frame",
    "engine/kvscope_telemetry/mirror/whole_blocks.py": "rows are checked and counted",
}
EPOCH: Final = 9
NUM_BLOCKS: Final = 64
WAIT_MS: Final = 60_000


class WatchedPool:
    """A pool whose changes are published on `endpoint`, and an app's page map of it."""

    def __init__(self, endpoint: str, qtbot: QtBot) -> None:
        self.pool = BlockPool(NUM_BLOCKS, 16)
        allocation = make_allocation("paged", self.pool, max_model_len=512, mapper=None)
        scheduler = Scheduler(
            self.pool, allocation, SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=512)
        )
        self.sockets = ServerSockets(endpoint, on_command=self._answer, heartbeat=self._beat)
        self.recorder = StepRecorder(EPOCH, self.pool, scheduler, self.sockets.publish)
        self.session = Session(LiveSource(endpoint))
        self.view = PageMapView(self.session)
        qtbot.addWidget(self.view)
        self.view.apply_theme(DARK)
        self.view.resize(800, 600)
        self.view.show()

    def refresh(self) -> None:
        """Poll and draw like a window in each display frame."""
        self.session.poll()
        self.view.refresh()

    def publish(self) -> None:
        """Publish a frame like an engine after each step."""
        self.recorder.record_idle(1, time.monotonic_ns())

    def is_up_to_date(self) -> bool:
        """Return whether the app shows the state of the pool."""
        self.refresh()
        return self.session.source.status.state is SourceState.LIVE and (
            self.session.mirror.num_active == self.pool.num_active
        )

    def close(self) -> None:
        self.session.close()
        self.sockets.close()

    def _answer(self, client: bytes, command: Command) -> None:
        if isinstance(command, GetSnapshot):
            hello = Hello(
                epoch=EPOCH,
                time_ns=time.monotonic_ns(),
                wall_time_ns=time.time_ns(),
                model=ModelInfo(name="none"),
                cache=CacheInfo(num_blocks=NUM_BLOCKS, block_size=16),
                device=DeviceInfo(kind="cpu", name="none"),
            )
            self.sockets.reply(client, self.recorder.snapshot(hello, command.tag, time.monotonic_ns()))
        elif isinstance(command, GetStatus):
            self.sockets.reply(client, Status(tag=command.tag, epoch=EPOCH))

    def _beat(self) -> Heartbeat:
        return Heartbeat(epoch=EPOCH, time_ns=time.monotonic_ns())


def test_allocated_block_reaches_its_page_map_pixel_through_the_listed_source_files_only(
    socket_folder: Path, qtbot: QtBot
) -> None:
    with Trace() as trace:
        watched = WatchedPool(f"ipc://{socket_folder}/engine", qtbot)
        watched.pool.allocate(1, owner=5)
        watched.publish()
        qtbot.waitUntil(watched.is_up_to_date, timeout=WAIT_MS)
        before = np.array(watched.view.scene.pixels)
        trace.begin()
        watched.pool.allocate(1, owner=5)
        watched.publish()
        while not watched.is_up_to_date():
            time.sleep(0.002)
        trace.end()
    after = np.array(watched.view.scene.pixels)
    watched.close()
    assert (after != before).any(), "the page map did not change"
    check_way(trace.ran, WAY, BESIDE)
