"""Polls the metrics of an engine's HTTP server on a separate thread.

Owns the thread, the interval, and the pauses after failures, which double. `readings` interprets the page.
"""

from __future__ import annotations

import random
import re
import threading
import time
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from kvscope_telemetry.collectors import external_engines
from kvscope_telemetry.collectors.external_address import ExternalAddress
from kvscope_telemetry.collectors.http_client import NOT_FOUND, HttpClient, NoAnswer
from kvscope_telemetry.collectors.readings import EngineReading
from kvscope_telemetry.collectors.scraped_page import ScrapedPage
from kvscope_telemetry.collectors.server_facts import ServerFacts
from kvscope_telemetry.errors import BadInput, ProtocolError
from kvscope_telemetry.kv_events.event_endpoints import check_endpoint

EVERY_S: Final = 1.0
PAUSES_S: Final = (1.0, 30.0)
"""Pause in seconds after the first failure, and maximum pause. The pause doubles with each failure."""
ASK_FACTS_AGAIN_S: Final = 300.0
_PROCESS_START: Final = "process_start_time_seconds"
"""Metric with the start time of the process, which Prometheus' client library exports in any program."""
_PLUGIN_METRIC: Final = "kvscope_inside_info"
"""Metric with the address at which kvscope's plugin in the engine publishes telemetry
(`kvscope_inside/announcement.py`).
"""
_PLUGIN_ADDRESS: Final = re.compile(r"(ipc|tcp)://[\w./:\[\]-]{1,200}")
"""Pattern of accepted plugin addresses. It is strict because users see them and may paste them into a shell."""
_END_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Scraped:
    time_ns: int
    """Time of the scrape on this machine's monotonic clock."""
    reading: EngineReading
    facts: ServerFacts


class Scraper:
    """Polls the metrics of one data-parallel rank. `poll_result`, `why` and `close` may be used by another thread.

    Raises BadInput if the certificate file of `address` cannot be used.
    """

    def __init__(
        self,
        address: ExternalAddress,
        *,
        every_s: float = EVERY_S,
        pauses_s: tuple[float, float] = PAUSES_S,
        http: HttpClient | None = None,
    ) -> None:
        self._address = address
        self._every_s, self._pauses_s = every_s, pauses_s
        self._http = http or HttpClient(address)
        self._result: Scraped | None = None
        self._facts: ServerFacts | None = None
        self._facts_s = 0.0
        self._last_reading: EngineReading | None = None
        self.why = f"{address.url(address.engine.metrics_path)} has not answered yet"
        """Reason why there are no metrics, in one sentence; empty if there are."""
        self.is_refused = False
        """Whether the server requires credentials or rejects those sent."""
        self.num_failures = 0
        self.num_ranks = 0
        """Number of data-parallel ranks on the metrics page; 0 if its metrics have no rank."""
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvscope-scraper", daemon=True)
        self._thread.start()

    def poll_result(self) -> Scraped | None:
        """Return and clear the newest result; None if there is no new one since the last call."""
        result, self._result = self._result, None
        return result

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop within a second, cancelling a request in progress. Idempotent."""
        self._end.set()
        self._http.cancel()
        self._thread.join(_END_S)

    def _run(self) -> None:
        pause_s = self._pauses_s[0]
        while not self._end.is_set():
            started_s = time.monotonic()
            if self._poll():
                pause_s = self._pauses_s[0]
                self._end.wait(max(self._every_s - (time.monotonic() - started_s), self._every_s / 10))
            else:
                # Random, so that clients of an engine that comes back do not all ask it at the same time.
                self._end.wait(pause_s * random.uniform(0.75, 1.0))
                pause_s = min(2 * pause_s, self._pauses_s[1])

    def _poll(self) -> bool:
        try:
            reading = self._read_metrics()
            facts = self._known_facts(reading)
        except NoAnswer as error:
            self._fail(self._with_advice(error), is_refused=error.is_refusal)
            return False
        except ProtocolError as error:
            self._fail(f"{self._address.url(self._address.engine.metrics_path)}: {error}")
            return False
        self._last_reading = reading
        self._result = Scraped(time.monotonic_ns(), reading, facts)
        self.why, self.is_refused, self.num_failures = "", False, 0
        return True

    def _fail(self, why: str, *, is_refused: bool = False) -> None:
        if not self._end.is_set():
            self.num_failures += 1
            self.is_refused, self.why = is_refused, why
            self._facts_s = 0.0

    def _with_advice(self, error: NoAnswer) -> str:
        advice = self._address.engine.without_metrics
        return f"{error}: {advice}" if error.status == NOT_FOUND and advice else str(error)

    def _read_metrics(self) -> EngineReading:
        address, engine = self._address, self._address.engine
        kind, body = self._http.get(engine.metrics_path)
        if kind == "text/html":
            raise ProtocolError("it is a web page, not metrics")
        page = ScrapedPage.parse(
            body.decode("utf-8", errors="replace"),
            (
                *[each.metrics_prefix for each in external_engines.ENGINES],
                *engine.other_prefixes,
                _PROCESS_START,
                _PLUGIN_METRIC,
            ),
            rank=(engine.rank_label, address.rank if address.names_rank else None),
            replicas=engine.replica_labels,
            model=address.model,
        )
        self.num_ranks = len(page.ranks)
        if not page.has(engine.metrics_prefix):
            raise ProtocolError(self._reason_without_metrics(page))
        plugin_address = page.label("endpoint", _PLUGIN_METRIC)
        return replace(
            engine.read_metrics(page), inside=plugin_address if _PLUGIN_ADDRESS.fullmatch(plugin_address) else ""
        )

    def _reason_without_metrics(self, page: ScrapedPage) -> str:
        other = next((each for each in external_engines.ENGINES if page.has(each.metrics_prefix)), None)
        if other is not None:
            return f"these are metrics of {other.name}: attach {other.scheme}://{self._address.authority}"
        selection = f" of rank {self._address.rank}" if self._address.rank else ""
        selection += f" of model {self._address.model!r}" if self._address.model else ""
        return f"it has no metrics of {self._address.engine.name}{selection}: is it another program's port?"

    def _known_facts(self, reading: EngineReading) -> ServerFacts:
        """Return the server's facts. They are queried again after a failure, a restart, or `ASK_FACTS_AGAIN_S`
        seconds.
        """
        now_s = time.monotonic()
        has_restarted = self._last_reading is not None and reading.is_restart_of(self._last_reading)
        if self._facts is None or has_restarted or now_s >= self._facts_s:
            self._facts = reachable(self._address.engine.ask_facts(self._get), self._address)
            self._facts_s = now_s + ASK_FACTS_AGAIN_S
        return self._facts

    def _get(self, path: str) -> Any:
        """Return the decoded JSON at a path; None if there is none. Raises NoAnswer if the server refuses access."""
        try:
            return msgspec.json.decode(self._http.get(path)[1])
        except NoAnswer as error:
            if error.is_refusal:
                raise
        except (msgspec.DecodeError, ValueError, RecursionError):
            pass
        return None


def reachable(facts: ServerFacts, address: ExternalAddress) -> ServerFacts:
    """Return `facts` with the endpoints that the server binds replaced by those to which kvscope connects;
    empty if that is impossible.
    """
    kv_events = "" if address.is_forwarded else _endpoint(facts.kv_events, address)
    if not kv_events:
        return replace(facts, kv_events="", replay="", topic="")
    return replace(facts, kv_events=kv_events, replay=_endpoint(facts.replay, address))


def _endpoint(bound: str, address: ExternalAddress) -> str:
    endpoint = address.on_this_host(bound)
    try:
        check_endpoint("endpoint", endpoint, is_client=True)
    except BadInput:
        return ""
    return endpoint
