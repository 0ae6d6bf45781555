"""One engine as shown by `kvscope top`: figures of the last seconds, and the requests that hold the most blocks.

Owns an overview of the last minute, from which `summaries.run_figures` computes the figures. Does not depend on a
terminal.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from kvscope_telemetry.addresses import Address, WatchedSource
from kvscope_telemetry.devices.device_reader import is_engine_share
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.fleet.own_member import CURRENT_STATES
from kvscope_telemetry.messages.model_names import short_name
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import DeviceSample, Frame, Heartbeat, Snapshot, TelemetryMessage
from kvscope_telemetry.mirror.follower import Follower
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.mirror.request_mirror import RequestMirror
from kvscope_telemetry.source import SourceState, SourceStatus
from kvscope_telemetry.summaries.run_figures import BY_KEY, pool_of, usage_of
from kvscope_telemetry.summaries.session_overview import SessionOverview
from kvscope_telemetry.summaries.summarizer import Summarizer
from kvscope_telemetry.summaries.summary import SECOND_NS

RATE_S: Final = 10
"""Seconds over which token rates are averaged, the same as in the fleet table.

All other figures need more requests, so they cover `WINDOW_S`.
"""
WINDOW_S: Final = 60
MAX_REQUESTS: Final = 200

RequestOrder = Callable[[RequestMirror], npt.NDArray[np.int64]]
"""Function that returns the sort key of each request; the largest key comes first."""
ORDERS: Final[dict[str, RequestOrder]] = {
    "blocks": lambda requests: requests.num_held.astype(np.int64),
    "tokens": lambda requests: _tokens(requests),
    "age": lambda requests: -requests.arrival_ns,
    "number": lambda requests: requests.number,
}


class RequestReading(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    request_id: str
    state: str
    num_tokens: int
    """Number of tokens of the prompt and of the output so far."""
    num_blocks: int
    age_s: float


class DeviceReading(msgspec.Struct, frozen=True, kw_only=True):
    """State of the engine's device at one moment. None means unknown."""

    name: str = ""
    utilization: float | None = None
    """Fraction of the device in use, 0 to 1."""
    is_engines_share: bool = False
    """Whether `utilization` is the fraction of all CPUs that the engine uses."""
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_watts: float | None = None


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State of an engine at one moment. An unknown figure is None, not 0.

    Token rates are averaged over the last ten seconds; hit rate, time to first token and preemptions over the last
    minute.
    """

    address: str
    state: SourceState = SourceState.CONNECTING
    reason: str = ""
    engine: str = ""
    version: str = ""
    model: str = ""
    num_blocks: int | None = None
    held_blocks: int | None = None
    cached_blocks: int | None = None
    free_blocks: int | None = None
    usage: float | None = None
    """Fraction of the KV pool's blocks that requests hold, 0 to 1."""
    num_running: int | None = None
    num_waiting: int | None = None
    preemptions_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    prefill_tokens_per_s: float | None = None
    hit_rate: float | None = None
    first_token_p50_s: float | None = None
    is_first_token_bound: bool = False
    """Whether `first_token_p50_s` is an upper bound, because the engine publishes only a histogram."""
    device: DeviceReading = DeviceReading()
    reports_requests: bool = msgspec.field(default=True, name="tells_requests")
    """Whether the engine reports individual requests. In JSON, the field is called `tells_requests`."""
    num_requests: int = 0
    """Total number of unfinished requests, which may be more than are listed in `requests`."""
    requests: tuple[RequestReading, ...] = ()


@dataclass(frozen=True, slots=True)
class _Span:
    from_ns: int
    until_ns: int


class WatchedEngine:
    """Watches the engine at `address` until `close`. An invalid or unreachable address is shown as the state of the
    engine.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._sink = _FigureSink()
        self._source: WatchedSource | None = None
        self._refusal = ""
        try:
            self._source = address.open(self._sink)
        except BadInput as error:
            self._refusal = str(error)

    @property
    def is_ready(self) -> bool:
        """Whether `read` returns full figures, or it is certain that it never will.

        True after one complete second of telemetry, or once the engine has refused the connection or ended.
        """
        if self._source is None:
            return True
        state = self._source.status.state
        return state in (SourceState.REFUSED, SourceState.ENDED) or (state in CURRENT_STATES and self._sink.has_seconds)

    def read(self, order: str = "blocks", limit: int = MAX_REQUESTS) -> EngineStatus:
        """Return the engine's current figures, with at most `limit` requests sorted by `order`, a key of `ORDERS`.

        Does not block.
        """
        if self._source is None:
            return EngineStatus(address=self._address.text, state=SourceState.REFUSED, reason=self._refusal)
        self._source.poll_update()  # discard: the figures come from the messages that the sink receives
        status = self._source.status
        reading = EngineStatus(address=self._source.name, state=status.state, reason=status.reason)
        return self._sink.enriched(reading, status, ORDERS[order], limit)

    def close(self) -> None:
        """Stop the source's thread. Idempotent."""
        if self._source is not None:
            self._source.close()


class _FigureSink:
    """Sink that summarizes an engine's messages. The reading thread calls `write`; another thread reads the figures."""

    def __init__(self) -> None:
        self.failure = ""
        self._lock = threading.Lock()
        self._follower = Follower()
        self._summarizer = Summarizer(self._follower)
        self._overview = SessionOverview()
        self._epoch: int | None = None
        self._since_ns = self._engine_ns = 0
        self._sample: DeviceSample | None = None

    @property
    def has_seconds(self) -> bool:
        with self._lock:
            return len(self._overview) > 1  # the first second may be incomplete

    def write(self, message: TelemetryMessage, data: bytes | None = None) -> bool:
        """Add a message. Returns False if a frame was lost, so that the source requests a snapshot."""
        with self._lock:
            now_ns = time.monotonic_ns()
            if isinstance(message, Snapshot) and message.hello.epoch != self._epoch:
                self._reset(message.hello.epoch, now_ns)
            summaries = self._summarizer.add_message(message, now_ns)
            self._summarizer.drain_events()
            if summaries:
                self._overview.extend(msgspec.structs.replace(summary, bins=None) for summary in summaries)
                self._overview.forget_before(now_ns - (WINDOW_S + 2) * SECOND_NS)
            self._follower.feed(message)
            if isinstance(message, Frame | Snapshot | Heartbeat):
                self._engine_ns = max(message.time_ns, self._engine_ns)
            elif isinstance(message, DeviceSample) and message.epoch == self._epoch:
                self._sample = message
            return not (isinstance(message, Frame) and self._follower.is_lost)

    def enriched(self, reading: EngineStatus, status: SourceStatus, order: RequestOrder, limit: int) -> EngineStatus:
        """Return a copy of `reading` with the model, device, figures and requests, as far as they are known."""
        with self._lock:
            self._follower.apply_pending()
            mirror = self._follower.mirror
            hello = mirror.hello
            if hello is None:
                return reading
            reading = msgspec.structs.replace(
                reading,
                engine=hello.capabilities.engine,
                version=hello.engine_version,
                model=short_name(hello.model.name),
                num_blocks=mirror.num_blocks if hello.capabilities.blocks else None,
                device=DeviceReading(name=hello.device.name or hello.device.kind),
            )
            if status.state not in CURRENT_STATES:
                return reading
            reading = msgspec.structs.replace(
                reading,
                device=self._device(reading.device.name, is_engines_share=is_engine_share(hello)),
                is_first_token_bound=not hello.capabilities.latencies,
                reports_requests=hello.capabilities.requests,
                **self._requests(mirror, order, limit),
            )
            return (
                msgspec.structs.replace(reading, **self._figures(has_pool=hello.capabilities.blocks))
                if len(self._overview)
                else reading
            )

    def _reset(self, epoch: int, now_ns: int) -> None:
        self._epoch, self._since_ns, self._engine_ns, self._sample = epoch, now_ns, 0, None
        self._overview = SessionOverview()

    def _figures(self, *, has_pool: bool) -> dict[str, object]:
        overview = self._overview
        until_ns = int(overview.time_ns[-1]) + SECOND_NS

        def figure(key: str, span_s: int) -> float | None:
            return BY_KEY[key].of(overview, _Span(max(until_ns - span_s * SECOND_NS, self._since_ns), until_ns - 1))

        def last_value(name: str) -> int | None:
            return _int_or_none(float(overview.column(name)[-1]))

        usage = float(usage_of(overview)[-1])
        pool = {
            "num_blocks": _int_or_none(float(pool_of(overview)[-1])) or None,
            "held_blocks": last_value("active_blocks"),
            "cached_blocks": last_value("cached_blocks"),
            "free_blocks": last_value("free_blocks"),
            "usage": None if np.isnan(usage) else usage,
        }
        preemptions_per_min = figure("preemptions_per_min", WINDOW_S)
        return {
            **(pool if has_pool else {}),
            "num_running": last_value("num_running"),
            "num_waiting": last_value("num_waiting"),
            "preemptions_per_s": None if preemptions_per_min is None else preemptions_per_min / 60,
            "decode_tokens_per_s": figure("decode_tokens_per_s", RATE_S),
            "prefill_tokens_per_s": figure("prefill_tokens_per_s", RATE_S),
            "hit_rate": figure("hit_rate", WINDOW_S),
            "first_token_p50_s": figure("first_token_p50_s", WINDOW_S),
        }

    def _device(self, name: str, *, is_engines_share: bool) -> DeviceReading:
        sample = self._sample
        if sample is None:
            return DeviceReading(name=name)
        return DeviceReading(
            name=name,
            utilization=sample.utilization if sample.utilization >= 0 else None,
            is_engines_share=is_engines_share,
            memory_used_bytes=sample.memory_used_bytes if sample.memory_used_bytes >= 0 else None,
            memory_total_bytes=sample.memory_total_bytes if sample.memory_total_bytes >= 0 else None,
            power_watts=sample.power_watts if sample.power_watts >= 0 else None,
        )

    def _requests(self, mirror: Mirror, order: RequestOrder, limit: int) -> dict[str, object]:
        requests = mirror.requests
        rows = np.flatnonzero(requests.state != RequestState.FINISHED)
        keys = order(requests)[rows]
        listed_rows = rows[np.lexsort((requests.number[rows], -keys))][:limit]
        tokens = _tokens(requests)
        readings = tuple(
            RequestReading(
                number=int(requests.number[row]),
                request_id=requests.request_ids[row],
                state=_state_name(int(requests.state[row])),
                num_tokens=int(tokens[row]),
                num_blocks=int(requests.num_held[row]),
                age_s=max(0, self._engine_ns - int(requests.arrival_ns[row])) / 1e9,
            )
            for row in listed_rows.tolist()
        )
        return {"num_requests": len(rows), "requests": readings}


def _tokens(requests: RequestMirror) -> npt.NDArray[np.int64]:
    tokens: npt.NDArray[np.int64] = requests.num_prompt_tokens + requests.num_output_tokens
    return tokens


def _state_name(state: int) -> str:
    names = [each.name.lower() for each in RequestState if each == state]
    return names[0] if names else RequestState.UNKNOWN.name.lower()


def _int_or_none(value: float) -> int | None:
    return None if np.isnan(value) else round(value)
