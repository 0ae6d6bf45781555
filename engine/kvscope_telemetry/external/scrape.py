"""Asks an engine's HTTP server for its metrics again and again, on a thread of its own.

Owns the thread, the pace, and the pauses after a failure, which double. What an answer says is `readings`'.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass
from typing import Final

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.external.address import ENGINES, ExternalAddress
from kvscope_telemetry.external.http_get import HttpGet, NoAnswer
from kvscope_telemetry.external.page import Page
from kvscope_telemetry.external.readings import READERS, EngineReading, names_of
from kvscope_telemetry.external.server_facts import ServerFacts, ask_facts

EVERY_S: Final = 1.0
PAUSES_S: Final = (1.0, 30.0)
"""After a failure, then twice as long each time."""
ASK_FACTS_AGAIN_S: Final = 300.0
METRICS: Final = "/metrics"
_PREFIXES: Final = (*[f"{engine}:" for engine in ENGINES], "process_start_time_seconds")
_END_S: Final = 1.0
_NOT_FOUND: Final = 404


@dataclass(frozen=True, slots=True)
class Scraped:
    """What came of one round."""

    time_ns: int
    """On this machine's monotonic clock."""
    reading: EngineReading
    facts: ServerFacts


class Scraper:
    """Of one rank. `take`, `why` and `close` are for another thread.

    Raises BadInput for a file of certificates that will not do.
    """

    def __init__(
        self,
        address: ExternalAddress,
        *,
        every_s: float = EVERY_S,
        pauses_s: tuple[float, float] = PAUSES_S,
        http: HttpGet | None = None,
    ) -> None:
        self._address = address
        self._every_s, self._pauses_s = every_s, pauses_s
        self._http = http or HttpGet(address)
        self._taken: Scraped | None = None
        self._facts: ServerFacts | None = None
        self._facts_s = 0.0
        self._before: EngineReading | None = None
        self.why = f"{address.url(METRICS)} has not answered yet"
        """Why there are no metrics, in one sentence; empty while there are."""
        self.is_refused = False
        """Whether the server is there, and does not let us in."""
        self.num_failures = 0
        """One after another."""
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvscope-scraper", daemon=True)
        self._thread.start()

    def take(self) -> Scraped | None:
        """The newest that was not taken yet."""
        taken, self._taken = self._taken, None
        return taken

    @property
    def is_running(self) -> bool:
        """Whether its thread goes on."""
        return self._thread.is_alive()

    def close(self) -> None:
        """End within a second: what is being asked is cut off. Idempotent."""
        self._end.set()
        self._http.cancel()
        self._thread.join(_END_S)

    def _run(self) -> None:
        pause_s = self._pauses_s[0]
        while not self._end.is_set():
            begun_s = time.monotonic()
            if self._round():
                pause_s = self._pauses_s[0]
                self._end.wait(max(self._every_s - (time.monotonic() - begun_s), self._every_s / 10))
            else:
                # Not all who watch an engine that comes back ask it at once.
                self._end.wait(pause_s * random.uniform(0.75, 1.0))
                pause_s = min(2 * pause_s, self._pauses_s[1])

    def _round(self) -> bool:
        """Ask once; whether it was answered."""
        try:
            reading = self._read_metrics()
            facts = self._known_facts(reading)
        except NoAnswer as error:
            self._fail(self._with_advice(error), is_refused=error.is_refusal)
            return False
        except ProtocolError as error:
            self._fail(f"{self._address.url(METRICS)}: {error}")
            return False
        self._before = reading
        self._taken = Scraped(time.monotonic_ns(), reading, facts)
        self.why, self.is_refused, self.num_failures = "", False, 0
        return True

    def _fail(self, why: str, *, is_refused: bool = False) -> None:
        if not self._end.is_set():
            self.num_failures += 1
            self.is_refused, self.why = is_refused, why
            self._facts_s = 0.0

    def _with_advice(self, error: NoAnswer) -> str:
        if error.status == _NOT_FOUND and self._address.engine == "sglang":
            return f"{error}: start SGLang with --enable-metrics"
        return str(error)

    def _read_metrics(self) -> EngineReading:
        address = self._address
        kind, body = self._http.get(METRICS)
        if kind == "text/html":
            raise ProtocolError("it is a web page, not metrics")
        page = Page(body.decode("utf-8", errors="replace"), _PREFIXES, address.rank, address.model)
        if not names_of(address.engine, page.names):
            raise ProtocolError(self._why_none(page))
        return READERS[address.engine](page)

    def _why_none(self, page: Page) -> str:
        others = [engine for engine in ENGINES if names_of(engine, page.names)]
        if others:
            return f"these are metrics of {ENGINES[others[0]]}: attach {others[0]}://{self._address.authority}"
        of_what = f" of rank {self._address.rank}" if self._address.rank else ""
        of_what += f" of model {self._address.model!r}" if self._address.model else ""
        return f"it has no metrics of {self._address.product}{of_what}: is it another program's port?"

    def _known_facts(self, reading: EngineReading) -> ServerFacts:
        """Asked for at first, after a failure or a restart, and sometimes."""
        now_s = time.monotonic()
        restarted = self._before is not None and reading.is_restart_of(self._before)
        if self._facts is None or restarted or now_s >= self._facts_s:
            self._facts = ask_facts(self._address, self._http.get)
            self._facts_s = now_s + ASK_FACTS_AGAIN_S
        return self._facts
