"""Serves `/metrics` from a separate process, for an engine without kvscope's HTTP server. The engine's only cost is one
more subscriber.

An engine that runs our plugin starts `python -m kvscope_telemetry.metrics.serve ENDPOINT HOST:PORT`, which ends when
its standard input is closed. Serves kvscope's own metrics only; all others are on the engine's own page.
"""

from __future__ import annotations

import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.metrics.metrics_page import PATH, MetricsPage
from kvscope_telemetry.operating_system import set_low_priority
from kvscope_telemetry.printable import print_line

_SILENCE_S: Final = 30.0


class MetricsServer:
    """Serves the metrics of the engine at `endpoint` at the address `listen` (HOST:PORT). Raises BadInput if either is
    not accepted.
    """

    def __init__(self, endpoint: str, listen: str, *, key: Path | None = None) -> None:
        host, port = _parsed(listen)
        self._page = page = MetricsPage(endpoint, key=key, with_vllm_names=False)

        class Handler(BaseHTTPRequestHandler):
            timeout = _SILENCE_S

            def do_GET(self) -> None:
                if self.path.partition("?")[0] != PATH:
                    self.send_error(404)
                    return
                body, content_type = page.render(self.headers.get("Accept", ""))
                self.send_response(200)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Log nothing: there is a scrape every few seconds."""

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            page.close()
            raise BadInput(f"cannot listen at {listen}: {error.strerror}") from None

    @property
    def url(self) -> str:
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}{PATH}"

    def serve(self) -> None:
        self._server.serve_forever()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._page.close()


def _parsed(listen: str) -> tuple[str, int]:
    host, separator, port = listen.rpartition(":")
    if not separator or not (port.isascii() and port.isdigit()) or int(port) > 65535 or not host or ":" in host:
        raise BadInput(f"{listen!r} is not accepted: HOST:PORT, such as 127.0.0.1:9400")
    return host, int(port)


def main() -> int:
    set_low_priority(10)
    try:
        server = MetricsServer(*sys.argv[1:3])
    except BadInput as error:
        print_line(str(error), file=sys.stderr)
        return 1
    threading.Thread(target=server.serve, daemon=True).start()
    sys.stdin.buffer.read()
    server.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
