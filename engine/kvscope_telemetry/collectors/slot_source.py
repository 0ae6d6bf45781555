"""Polls llama.cpp's `/slots` and presents it as a `Source`: a ledger row is a fixed number of tokens of a slot.

Owns the polling thread. Slots are polled once a second, and metrics once in 10 s, because each scrape resets the
averages in them. A server that sleeps, or a router that only forwards requests, gets one request for `/props` per 10 s.
Polling `/slots` wakes a sleeping server and keeps an idle one from falling asleep. An idle server is therefore first
asked by `/props` whether it sleeps. After `MAX_IDLE_POLLS` consecutive idle polls only its metrics are read, which
neither wake it nor keep it awake, and `/slots` is read again when the metrics change.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final
from urllib.parse import quote

import msgspec

from kvscope_telemetry.collectors.external_address import ExternalAddress
from kvscope_telemetry.collectors.http_client import NOT_FOUND, HttpClient, NoAnswer
from kvscope_telemetry.collectors.prompted_source import PromptedSource
from kvscope_telemetry.collectors.readings import EngineReading
from kvscope_telemetry.collectors.scraped_page import ScrapedPage
from kvscope_telemetry.collectors.server_facts import mapping, printable_text_or_empty
from kvscope_telemetry.collectors.slot_readings import SlotReading, exceed_one_context, read_slots
from kvscope_telemetry.collectors.slot_rows import SlotRows
from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.ledger import NO_OWNER, BlockState
from kvscope_telemetry.messages.commands import BlockContent
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import CacheInfo, Counters, DeviceInfo, Event, Heartbeat, Hello, ModelInfo
from kvscope_telemetry.producer.cache_state import CacheState, KnownRequest
from kvscope_telemetry.source import SourceState, SourceStatus
from kvscope_telemetry.sources.sink import Sink
from kvscope_telemetry.transport.host_id import host_id

POLL_S: Final = 1.0
SLOW_POLL_S: Final = 10.0
"""Seconds between polls of the metrics, and between polls of a server that sleeps."""
MAX_IDLE_POLLS: Final = 10
"""Number of consecutive polls of `/slots` without a running task after which only metrics are polled."""
_NOT_ENABLED: Final = (404, 501)
_SLEEPING: Final = "it sleeps: its slots are not read until a request wakes it"
_NO_METRICS: Final = "the number of waiting requests is unknown: start llama-server with --metrics"
DEFAULT_SLOTS: Final = 4
"""Number of slots of a llama-server that was started without `-np`. Its slots then share one KV cache."""
_ASSUMED_UNIFIED: Final = "not reported, so assumed: the slots share one KV cache; if not, attach with ?kv_unified=0"
_ASSUMED_SEPARATE: Final = (
    "not reported, so assumed: each slot has its own KV cache; if they share one, attach with ?kv_unified=1"
)
_ROUTER: Final = "it routes requests to other servers: attach llama://HOST:PORT/?model=NAME, or one of these servers"


class Total:
    """Running total of a counter that is sampled from slots and corrected by the server's own counter, if it exists.

    Sampling misses tasks that start and end between two polls. The total never decreases.
    """

    def __init__(self) -> None:
        self.value = 0
        self._seen = self._missed = 0
        self._base: int | None = None

    def add(self, number: int) -> None:
        self._seen += number
        self.value = max(self.value, self._seen + self._missed)

    def correct(self, counter: int | None, num_unfinished: int = 0) -> None:
        """Correct the total by the server's `counter`, which does not yet include `num_unfinished` sampled tokens."""
        if counter is None:
            return
        if self._base is None:
            self._base = self._seen - counter - num_unfinished
        self._missed = self._base + counter + num_unfinished - self._seen
        self.add(0)


class SlotState:
    """A server's slots as a `CacheState`, created from the first poll and updated by later ones."""

    def __init__(
        self, slots: list[SlotReading], address: ExternalAddress, model: str, version: str, *, is_unified: bool
    ) -> None:
        self.num_ctx = slots[0].num_ctx
        self._rows = SlotRows(len(slots), self.num_ctx, is_unified=is_unified)
        self._is_assumed = len(slots) > 1 and not address.kv_unified
        layout = f"{len(slots)} slots" + (", unified" if is_unified else "") + (", assumed" if self._is_assumed else "")
        engine, now_ns = address.engine, time.monotonic_ns()
        hello = Hello(
            epoch=secrets.randbits(48),
            time_ns=now_ns,
            wall_time_ns=time.time_ns(),
            model=ModelInfo(name=model, max_model_len=self.num_ctx),
            cache=CacheInfo(
                num_blocks=self._rows.num_rows,
                block_size=self._rows.cell,
                allocator=layout,
                prefix_caching=True,
                max_num_seqs=len(slots),
                slot_blocks=self._rows.slot_rows,
            ),
            device=DeviceInfo(kind="unknown"),
            engine_version=f"{engine.name} {version}".strip(),
            host=host_id(),
            capabilities=msgspec.structs.replace(engine.capabilities, physical_rows=not is_unified),
        )
        self.state = CacheState(hello)
        self._requests: list[KnownRequest | None] = [None] * len(slots)
        self._tasks = [slot.task if not slot.is_processing else -1 for slot in slots]
        """For each slot, the id of the last task that was reported as a request, or had ended before the first poll."""
        self._seen = [-1] * len(slots)
        """For each slot, the task id in the last poll; -1 if it had none."""
        self._prompt, self._cached, self._output = Total(), Total(), Total()
        self._speculation = Total(), Total()
        self._owners = [NO_OWNER] * len(slots)
        """For each slot, the number of the last request reported for it."""
        self._last_cells = [(0, False, NO_OWNER)] * len(slots)

    @property
    def assumption(self) -> str:
        """Text for users about the assumed layout of the slots' KV cache; empty if the layout is known."""
        if not self._is_assumed:
            return ""
        return _ASSUMED_SEPARATE if self._rows.slot_rows else _ASSUMED_UNIFIED

    def fits(self, slots: list[SlotReading]) -> bool:
        """Return whether `slots` can be of the same server process and fit its assumed KV cache. In one process, a slot
        that once had a task always reports one.
        """
        is_same = len(slots) == len(self._requests) and all(slot.num_ctx == self.num_ctx for slot in slots)
        if self._is_assumed and not self._rows.slot_rows and exceed_one_context(slots):
            return False
        return is_same and all(slot.task >= 0 or self._seen[slot.slot] < 0 for slot in slots)

    def apply(self, slots: list[SlotReading], now_ns: int) -> None:
        for slot in slots:  # first of all slots: with a unified KV cache, others may reuse the rows
            self.state.free_blocks(self._rows.shrink(slot.slot, slot.num_tokens))
        for slot in slots:
            self._rows.grow(slot.slot, slot.num_tokens)
            self._update_task(slot, now_ns)
            self._update_cells(slot)
            self._seen[slot.slot] = slot.task
        self.state.totals["num_running"] = sum(slot.is_processing for slot in slots)
        self._publish_totals()

    def correct(self, reading: EngineReading) -> None:
        """Apply the server's own counters. Must be called directly after `apply`."""
        unfinished = sum(request.num_output_tokens for request in self.state.requests.values())
        self._output.correct(reading.generation_tokens, unfinished)
        self._prompt.correct(reading.prompt_tokens)
        self._cached.correct(reading.cached_tokens)
        for total, counter in zip(self._speculation, (reading.draft_tokens, reading.accepted_tokens), strict=True):
            total.correct(counter)
        self.state.totals["num_waiting"] = reading.num_waiting or 0
        self._publish_totals()

    def reset(self, now_ns: int) -> None:
        """Finish all requests and free all rows, because the server has dropped the contents of its slots."""
        empty = (-1, 0, 0, 0, 0)
        for index, request in enumerate(self._requests):
            if request is not None:
                self._finish(index, request, now_ns)
            self._tasks[index] = self._seen[index] = -1
            self._owners[index] = NO_OWNER
            self.state.free_blocks(self._rows.shrink(index, 0))
            self._update_cells(SlotReading(index, self.num_ctx, False, *empty))
        self.state.totals["num_running"] = 0

    def _publish_totals(self) -> None:
        drafts, accepted = self._speculation
        self.state.totals |= {
            "prompt_tokens": self._prompt.value,
            "cached_tokens": self._cached.value,
            "generation_tokens": self._output.value,
            "draft_tokens": drafts.value,
            "accepted_tokens": accepted.value,
        }

    def _update_task(self, slot: SlotReading, now_ns: int) -> None:
        request = self._requests[slot.slot]
        is_new = slot.task >= 0 and slot.task != self._tasks[slot.slot]
        if request is not None and (is_new or not slot.is_processing):
            if not is_new:
                self._update(request, slot)
            self._finish(slot.slot, request, now_ns)
            request = None
        num_prompt = slot.num_processed + slot.num_cached
        if is_new and not slot.is_processing and not num_prompt:
            # The task started and ended between two polls: only what the slot holds is known.
            self._tasks[slot.slot] = slot.task
            self._owners[slot.slot] = NO_OWNER
            self.state.count(admitted=1, finished=1)
        elif is_new and (slot.num_decoded or not slot.is_processing):
            # Reported only now, because the prompt's length is unknown before the first output token.
            self._tasks[slot.slot] = slot.task
            request = self.state.add_request(f"task {slot.task}", num_prompt_tokens=num_prompt, arrival_ns=now_ns)
            request.state, request.num_cached_tokens = RequestState.RUNNING, slot.num_cached
            self.state.count(admitted=1)
            self._prompt.add(slot.num_processed)
            self._cached.add(slot.num_cached)
            self._requests[slot.slot] = request
            self._owners[slot.slot] = request.number
            self._update(request, slot)
            if not slot.is_processing:
                self._finish(slot.slot, request, now_ns)
        elif request is not None:
            self._update(request, slot)

    def _update(self, request: KnownRequest, slot: SlotReading) -> None:
        rows, table = self._rows.of_slot(slot.slot), request.tables[0]
        if len(table) != len(rows):
            start = min(len(table), len(rows))
            request.set_table(rows[start:], start=start)
        # A slot that is done may restart its count from 0.
        num_outputs = max(slot.num_decoded, request.num_output_tokens)
        if not slot.is_processing and not slot.is_speculative:  # it holds prompt and output, except for the last token
            num_outputs = max(num_outputs, slot.num_tokens - request.info.num_prompt_tokens + 1)
        self._output.add(num_outputs - request.num_output_tokens)
        request.num_output_tokens, request.num_computed_tokens = num_outputs, slot.num_tokens
        self.state.touch(request)

    def _finish(self, slot: int, request: KnownRequest, now_ns: int) -> None:
        cause = f"ended after {request.num_output_tokens} tokens; the slot keeps its KV"
        self.state.add_event(Event(kind="finished", time_ns=now_ns, number=request.number, cause=cause))
        self.state.count(finished=1)
        self.state.finish(request)
        self._requests[slot] = None

    def _update_cells(self, slot: SlotReading) -> None:
        is_unreported = slot.is_processing and self._requests[slot.slot] is None
        num_before, was_processing, owner_before = self._last_cells[slot.slot]
        owner = NO_OWNER if is_unreported else self._owners[slot.slot]
        rows, cell = self._rows.of_slot(slot.slot), self._rows.cell
        self._last_cells[slot.slot] = min(slot.num_tokens, len(rows) * cell), slot.is_processing, owner
        start = (
            0
            if (slot.is_processing, owner) != (was_processing, owner_before)
            else min(num_before, slot.num_tokens) // cell
        )
        if len(rows) > start:
            self.state.set_blocks(
                rows[start:],
                state=BlockState.ACTIVE if slot.is_processing else BlockState.CACHED,
                ref_count=int(slot.is_processing),
                filled=[min(cell, slot.num_tokens - index * cell) for index in range(start, len(rows))],
                owner=owner,
            )


class SlotSource(PromptedSource):
    """Source that polls a llama.cpp server, which may start later. As a context manager, it closes itself on exit.

    Raises BadInput if the certificate file of `address` cannot be used.
    """

    def __init__(self, address: ExternalAddress, *, sink: Sink | None = None, every_s: float = POLL_S) -> None:
        super().__init__(address, sink)
        self._every_s = every_s
        self._http = HttpClient(address)
        self._slots: SlotState | None = None
        self._why = f"{address.url('/slots')} has not answered yet"
        self._is_refused = self._is_backed_off = self._is_busy = False
        self._num_frames = self._num_restarts = self._last_sign_ns = self._num_idle_polls = 0
        self._slow_poll_s = every_s / POLL_S * SLOW_POLL_S
        self._metrics_s = 0.0  # time of the next scrape of the metrics, monotonic seconds
        self._has_metrics = True
        self._reading: EngineReading | None = None
        self._has_exceeded = False
        """Whether the slots of this server process held more tokens together than one of them may."""
        self._process_marker = ""
        """The server's `media_marker`, which changes with each start; empty if the server reports none."""
        self._failure = ""
        self._thread = threading.Thread(target=self._run, name="kvscope-slots", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        return self._address.name

    @property
    def status(self) -> SourceStatus:
        state = SourceState.LIVE
        if self._failure:
            state = SourceState.ENDED
        elif self._is_refused:
            state = SourceState.REFUSED
        elif self._slots is None:
            state = SourceState.CONNECTING
        elif self._why and not self._is_backed_off:
            state = SourceState.STALE
        return SourceStatus(
            state=state,
            reason=self._failure or self._why or self._unknown_text(),
            frames_received=self._num_frames,
            frames_dropped=self._updates.num_discarded,
            resyncs=self._num_restarts,
            messages_rejected=0,
            num_skipped=0,
            last_message_ns=self._last_sign_ns,
            adapters=self._prompter.adapters,
        )

    def _unknown_text(self) -> str:
        if self._slots is None:
            return ""
        return "; ".join(filter(None, ("" if self._has_metrics else _NO_METRICS, self._slots.assumption)))

    def contents(self, rows: Iterable[int]) -> tuple[BlockContent, ...]:
        """Return block contents without tokens, because `/slots` does not report them."""
        return tuple(BlockContent(block=row) for row in rows)

    def close(self) -> None:
        self._end.set()
        self._http.cancel()
        super().close()

    # Polling thread

    def _run(self) -> None:
        try:
            while not self._end.is_set():
                started_s = time.monotonic()
                self._poll(time.monotonic_ns())
                pause_s = self._slow_poll_s if self._is_backed_off else self._every_s
                self._end.wait(max(pause_s - (time.monotonic() - started_s), 0.1 * self._every_s))
        except Exception as error:
            self._failure = f"reading failed: {error!r:.200}"
            raise

    def _poll(self, now_ns: int) -> None:
        try:
            props = {} if self._is_busy else self._props()
            if props.get("is_sleeping") is True or props.get("role") == "router":
                self._back_off(_ROUTER if props.get("role") == "router" else _SLEEPING, now_ns)
                return
            reading = self._metrics() if self._num_idle_polls >= MAX_IDLE_POLLS else None
            is_known = reading is not None and not reading.num_running and reading == self._reading
            slots = None if is_known else read_slots(self._get("/slots"))
            if slots is not None and (self._slots is None or not self._is_same(slots, props)):
                self._start_state(slots, props or self._props())
            if slots is not None and reading is None and now_ns / 1e9 >= self._metrics_s:
                self._metrics_s = now_ns / 1e9 + self._slow_poll_s
                reading = self._metrics()
        except NoAnswer as error:
            self._fail(self._error_text(error), is_refused=error.is_refusal)
            return
        except ProtocolError as error:
            self._fail(f"{self._address.url('/slots')}: {error}")
            return
        self._why, self._is_refused, self._is_backed_off, self._last_sign_ns = "", False, False, now_ns
        self._publish(slots, reading, now_ns)

    def _fail(self, why: str, *, is_refused: bool = False) -> None:
        self._why, self._is_refused, self._is_backed_off = why, is_refused, False
        # The server that answers next may be another one: ask for its /props first.
        self._is_busy, self._num_idle_polls = False, 0

    def _back_off(self, why: str, now_ns: int) -> None:
        self._why, self._is_backed_off, self._is_refused, self._last_sign_ns = why, True, False, now_ns
        self._num_idle_polls = 0
        if self._slots is not None:
            self._slots.reset(now_ns)
            self._publish_frame(now_ns)

    def _is_same(self, slots: list[SlotReading], props: Mapping[str, Any]) -> bool:
        assert self._slots is not None, "nothing was looked at before"
        return self._slots.fits(slots) and printable_text_or_empty(props.get("media_marker")) in (
            "",
            self._process_marker,
        )

    def _start_state(self, slots: list[SlotReading], props: Mapping[str, Any]) -> None:
        self._num_restarts += self._slots is not None
        facts = self._address.engine.ask_facts(lambda _: props)
        marker = printable_text_or_empty(props.get("media_marker"))
        self._has_exceeded = exceed_one_context(slots) or (self._has_exceeded and marker == self._process_marker)
        is_unified = self._address.kv_unified == "1" or (
            not self._address.kv_unified and len(slots) == DEFAULT_SLOTS and not self._has_exceeded
        )
        self._slots = SlotState(slots, self._address, facts.model, facts.version, is_unified=is_unified)
        self._process_marker = marker
        self._has_metrics, self._reading, self._metrics_s = True, None, 0.0
        self._resync_wanted = True

    def _publish(self, slots: list[SlotReading] | None, reading: EngineReading | None, now_ns: int) -> None:
        assert self._slots is not None, "there is a state once slots were read"
        before = self._slots.state.counters()
        if slots is not None:
            self._slots.apply(slots, now_ns)
            self._is_busy = any(slot.is_processing for slot in slots)
            self._num_idle_polls = 0 if self._is_busy else self._num_idle_polls + 1
        if reading is not None:
            self._reading = reading
            self._slots.correct(reading)
        self._publish_frame(now_ns, before)

    def _publish_frame(self, now_ns: int, before: Counters | None = None) -> None:
        assert self._slots is not None, "there is something to give"
        state = self._slots.state
        after = state.counters()
        before = before or after
        frame = state.frame(
            state.step + 1,
            now_ns,
            num_decode_tokens=after.generation_tokens - before.generation_tokens,
            num_prefill_tokens=after.prompt_tokens - before.prompt_tokens,
        )
        messages: list[Any] = [frame]
        self._num_frames += 1
        if self._updates.wants_snapshot(now_ns) or self._resync_wanted:
            self._resync_wanted = False
            messages = [state.snapshot()]
        messages.append(
            Heartbeat(
                epoch=state.hello.epoch,
                time_ns=now_ns,
                seq=state.seq,
                step=state.step,
                num_unfinished=len(state.requests),
            )
        )
        self._updates.enqueue(messages)
        with self._changed:
            self._changed.notify_all()

    def _metrics(self) -> EngineReading | None:
        """Scrape the metrics, which count activity that slots do not report. A server without metrics is not asked
        again.
        """
        if not self._has_metrics:
            return None
        engine = self._address.engine
        try:
            _, body = self._http.get(self._path(engine.metrics_path))
            page = ScrapedPage.parse(
                body.decode("utf-8", "replace"), (engine.metrics_prefix,), rank=(engine.rank_label, 0)
            )
        except NoAnswer as error:
            self._has_metrics = error.status not in _NOT_ENABLED
            return None
        except ProtocolError:
            self._has_metrics = False
            return None
        self._has_metrics = page.has(engine.metrics_prefix)
        return engine.read_metrics(page) if self._has_metrics else None

    def _props(self) -> Mapping[str, Any]:
        return mapping(self._get("/props"))

    def _path(self, path: str) -> str:
        """Return `path` with the model of the address, by which a router selects one of its servers."""
        model = self._address.model
        return f"{path}?model={quote(model, safe='')}" if model else path

    def _get(self, path: str) -> Any:
        _, body = self._http.get(self._path(path))
        try:
            return msgspec.json.decode(body)
        except (msgspec.DecodeError, ValueError, RecursionError):
            raise ProtocolError(f"{path} is not JSON") from None

    def _error_text(self, error: NoAnswer) -> str:
        if error.status in _NOT_ENABLED and error.status != NOT_FOUND:
            return f"{error}: start llama-server without --no-slots"
        return str(error)
