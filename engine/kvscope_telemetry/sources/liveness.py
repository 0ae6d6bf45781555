"""Derives the state of the connection to an engine: the rules of `SourceState`.

Owns the rules by which an engine counts as loading, live, stuck, stale or ended. All times are on this machine's
monotonic clock, except the age of a step, which is the difference of two times of the engine. Written by the reading
thread; `state` may be called from any thread.
"""

from __future__ import annotations

from typing import Final

from kvscope_telemetry.messages.commands import Status
from kvscope_telemetry.messages.telemetry import Heartbeat, Progress
from kvscope_telemetry.source import SourceState

_STAGES: Final = {
    "compile": "compiling for this processor",
    "download": "downloading",
    "convert": "converting",
    "wait": "waiting for the GPU:",
    "load": "loading",
    "warm up": "warming up",
}
STALE_NS: Final = 1_500_000_000
REJECTION_SHOWN_NS: Final = 10_000_000_000
"""Time for which an error about an undecodable message is shown while the engine is otherwise fine."""
STUCK_NS: Final = 5_000_000_000
DEAD_AFTER_NS: Final = 700_000_000
"""Silence after which a disconnected local engine's process is considered ended; longer than the heartbeat interval."""


class Liveness:
    """Signs of life of one engine, and the state that follows from them."""

    def __init__(self, *, is_local: bool) -> None:
        self.last_message_ns = 0
        self.is_connected = False
        self.is_paused = False
        self.is_local = is_local
        """Whether the engine is on this machine, so that a closed connection means that its process ended."""
        self.refusal = ""
        """Text saying why the engine refuses the connection."""
        self.absence = ""
        """Text saying why there is no connection."""
        self.rejection = ""
        """Error of the newest message that was not accepted."""
        self.rejected_ns = 0
        """Time on our monotonic clock at which `rejection` was set."""
        self._paused_by = ""
        self._is_known = False  # whether a snapshot of the current engine arrived
        self._loading: str | None = None
        self._ended: str | None = None
        self._step = -1
        self._step_since_ns = 0
        self._step_age_ns = 0
        self._num_unfinished = 0

    def record_message(self, now_ns: int) -> None:
        self.last_message_ns = now_ns

    def record_snapshot(self) -> None:
        """Record that a snapshot arrived, so the engine runs."""
        self._is_known, self._loading, self._ended = True, None, None
        self._step, self._num_unfinished = -1, 0

    def heartbeat(self, beat: Heartbeat, now_ns: int) -> None:
        if beat.step != self._step or not beat.num_unfinished:
            self._step, self._step_since_ns = beat.step, now_ns
        self._num_unfinished = beat.num_unfinished
        if beat.paused_by or self._paused_by:
            self.is_paused = bool(beat.paused_by)
        self._paused_by = beat.paused_by
        in_step = beat.step_started_ns > 0
        self._step_age_ns = beat.time_ns - beat.step_started_ns if in_step else STUCK_NS

    def record_status(self, status: Status) -> None:
        """Record the engine's reply to a status request."""
        self.is_paused, self._paused_by = status.paused, status.paused_by
        self._loading = None
        if status.phase == "loading":
            self._ended, self._loading = None, _progress_text(status.progress)
        elif status.phase == "failed":
            self._ended = status.reason or "the engine failed"

    def progress(self, progress: Progress) -> None:
        """Record progress of a download or model load. It is ignored if the engine already runs."""
        if self._loading is not None or self._ended is not None or not self._is_known:
            self._ended, self._loading = None, _progress_text(progress)

    def goodbye(self, reason: str) -> None:
        self._loading, self._ended = None, reason or "the engine stopped"

    def connection(self, is_connected: bool) -> bool:
        """Record whether there is a connection now. Returns whether this is a change."""
        changed = self.is_connected != is_connected
        self.is_connected = is_connected
        if changed and not is_connected:
            self._loading = None
        return changed

    @property
    def has_ended(self) -> bool:
        return self._ended is not None

    def state(self, now_ns: int) -> tuple[SourceState, str]:
        """Return the state, and its reason as text or "" if there is none."""
        silent_ns = now_ns - self.last_message_ns
        if self.refusal:
            return SourceState.REFUSED, self.refusal
        if self._loading is not None:
            return SourceState.LOADING, self._loading
        if self._ended is not None:
            return SourceState.ENDED, self._ended
        if not self._is_known:
            return SourceState.CONNECTING, self.rejection or self.absence
        if not self.is_connected and self.is_local and silent_ns > DEAD_AFTER_NS:
            return SourceState.ENDED, "the engine stopped unexpectedly"
        if silent_ns > STALE_NS:
            return SourceState.STALE, f"no telemetry for {silent_ns / 1e9:.1f} s"
        if self._is_stuck(now_ns):
            stands_s = (now_ns - self._step_since_ns) / 1e9
            return SourceState.STUCK, f"step {self._step} has not finished for {stands_s:.0f} s"
        if self.is_paused:
            return SourceState.PAUSED, f"by {self._paused_by}" if self._paused_by else ""
        is_news = self.rejection and now_ns - self.rejected_ns < REJECTION_SHOWN_NS
        return SourceState.LIVE, self.rejection if is_news else ""

    def may_be_paused(self, now_ns: int) -> bool:
        """Return whether unfinished requests have made no progress for some time. The caller should then
        request the engine's status to find out whether the engine is paused.
        """
        return self._num_unfinished > 0 and now_ns - self._step_since_ns > STUCK_NS // 2

    def _is_stuck(self, now_ns: int) -> bool:
        stands_still = self._num_unfinished > 0 and now_ns - self._step_since_ns >= STUCK_NS
        return stands_still and self._step_age_ns >= STUCK_NS and not self.is_paused


def _progress_text(progress: Progress | None) -> str:
    if progress is None:
        return ""
    share = f" {progress.done / progress.total:.0%}" if progress.total else ""
    return f"{_STAGES.get(progress.stage, progress.stage)} {progress.detail}".strip() + share
