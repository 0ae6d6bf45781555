"""A server with the part of Prometheus' HTTP API that kvscope uses. Its answers have the form of Prometheus 2.42's."""

from __future__ import annotations

import http.server
import json
import re
import threading
import time
from typing import Any
from urllib.parse import parse_qs, urlsplit

from prometheus_client.parser import text_string_to_metric_families

Series = dict[tuple[tuple[str, str], ...], list[tuple[float, str]]]
_RANGE = re.compile(r"\{(?P<matchers>.*)\}\[(?P<seconds>\d+)s\]")
_MATCHER = re.compile(r'(\w+)(=~|!~|=)"((?:[^"\\]|\\.)*)"')


class FakePrometheus:
    """Answers queries from the scrapes that a test adds, as samples with the times of the scrapes."""

    def __init__(self) -> None:
        self.series: Series = {}
        self.clock_offset_s = 0.0
        """Seconds by which the server's clock is ahead of this machine's."""
        self.authorization = ""
        """Header that requests need; empty for none."""
        self.is_failing = False
        self.num_queries = 0
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                fake.num_queries += 1
                status, content = fake.answer(self.path, self.headers.get("Authorization", ""))
                body = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.port = self._http.server_address[1]
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    @property
    def now_s(self) -> float:
        return time.time() + self.clock_offset_s

    def scrape(self, page: bytes, time_s: float, *, job: str = "vllm", instance: str = "gpu1:8000") -> None:
        """Store the samples of a metrics page, as scraped at `time_s` on the server's clock."""
        for family in text_string_to_metric_families(page.decode()):
            for sample in family.samples:
                labels = {**sample.labels, "__name__": sample.name, "job": job, "instance": instance}
                text = f"{sample.value:g}" if sample.value < 1e6 else f"{sample.value:.0f}"
                self.series.setdefault(tuple(sorted(labels.items())), []).append((round(time_s, 3), text))

    def answer(self, path: str, authorization: str) -> tuple[int, Any]:
        if self.is_failing:
            return 503, {"status": "error"}
        if self.authorization and authorization != self.authorization:
            return 401, {}
        parts = parse_qs(urlsplit(path).query)
        query = parts["query"][0]
        time_s = float(parts["time"][0]) if "time" in parts else self.now_s
        if query == "time()":
            return 200, _success("scalar", [time_s, f"{self.now_s:.3f}"])
        match = _RANGE.search(query)
        assert match is not None, query
        selected = self._select(match["matchers"], time_s - int(match["seconds"]), time_s)
        if not query.startswith("count by (job, instance)"):
            return 200, _success("matrix", [{"metric": labels, "values": values} for labels, values in selected])
        groups = {(labels["job"], labels["instance"]) for labels, _ in selected}
        counted = [{"metric": {"job": job, "instance": at}, "value": [time_s, "1"]} for job, at in groups]
        return 200, _success("vector", counted)

    def _select(self, matchers: str, since_s: float, until_s: float) -> list[tuple[dict[str, str], Any]]:
        found = []
        for key, values in self.series.items():
            labels = dict(key)
            if all(_matches(labels.get(name, ""), how, text) for name, how, text in _MATCHER.findall(matchers)):
                inside = [value for value in values if since_s < value[0] <= until_s]
                if inside:
                    found.append((labels, inside))
        return found

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


def _matches(value: str, how: str, text: str) -> bool:
    plain = text.replace('\\"', '"').replace("\\\\", "\\")
    if how == "=":
        return value == plain
    return bool(re.fullmatch(plain, value)) == (how == "=~")


def _success(kind: str, result: object) -> dict[str, Any]:
    return {"status": "success", "data": {"resultType": kind, "result": result}}
