"""Webhook: posts each alarm that fires or is resolved to a URL as JSON, on its own thread.

Owns the payload (`docs/alarms.md`), the bounded queue before the thread, and retries. Callers never block.
"""

from __future__ import annotations

import http.client
import math
import queue
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from kvscope_telemetry.alarms.alarm_engine import Alarm, alarm_text, bookmark_of
from kvscope_telemetry.errors import BadInput

TIMEOUT_S: Final = 5.0
RETRY_AFTER_S: Final = (1.0, 4.0)
"""Delays in seconds before each of the two retries of a failed post."""
MAX_QUEUED: Final = 100


def checked_url(url: str) -> str:
    """Return `url` without surrounding spaces. Raises BadInput unless it is an http or https URL without
    credentials.
    """
    url = url.strip()
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_valid = False
    if not is_valid or not url.isascii() or not url.isprintable() or " " in url:
        raise BadInput(f"webhook {url!r:.80} is not accepted: http://HOST/… or https://HOST/…")
    if parts.username is not None:
        raise BadInput("a webhook with a user or password in its URL is not accepted: http://HOST/… or https://HOST/…")
    return url


def payload(alarm: Alarm, engine: str, instance: str) -> dict[str, Any]:
    """Return the JSON object that is posted for an alarm. `instance` is the address of the engine."""
    bookmark = bookmark_of(alarm)
    return {
        "name": alarm.name,
        "expression": alarm.rule.expression,
        "for_s": alarm.rule.seconds,
        "state": "resolved" if alarm.until_ns else "firing",
        "value": _finite(alarm.value),
        "worst": _finite(alarm.worst),
        "summary": f"{alarm.name}: {alarm_text(alarm)}".removesuffix(": "),
        "time": _time_text(alarm.until_ns or alarm.fired_ns),
        "startsAt": _time_text(alarm.begin_ns),
        "endsAt": _time_text(alarm.until_ns) if alarm.until_ns else None,
        "engine": engine,
        "instance": instance,
        "fingerprint": bookmark.bookmark_id,
    }


class Webhook:
    """Posts JSON documents to `url` from a background thread. Raises BadInput for an invalid URL."""

    def __init__(self, url: str) -> None:
        self.url = checked_url(url)
        self.failure = ""
        """Reason why the last post failed or was dropped; empty after a success."""
        self._posts: queue.Queue[bytes | None] = queue.Queue(MAX_QUEUED + 1)
        self._closing = threading.Event()
        self._opener = urllib.request.build_opener(_NoRedirects)
        self._thread = threading.Thread(target=self._run, name="webhook", daemon=True)
        self._thread.start()

    def post(self, document: Mapping[str, Any]) -> bool:
        """Queue a document; never blocks. Returns False and drops it if `MAX_QUEUED` documents are queued or
        the webhook is closed.
        """
        if self._closing.is_set():
            self.failure = f"{self._where}: closed; the alarm is not posted"
            return False
        if self._posts.qsize() >= MAX_QUEUED:
            self.failure = f"{self._where}: {MAX_QUEUED} alarms wait to be posted; more are dropped"
            return False
        self._posts.put_nowait(msgspec.json.encode(document))
        return True

    def close(self, timeout_s: float = 0.0) -> None:
        """Stop the thread after the queued posts, each tried once. Waits at most `timeout_s`. Idempotent."""
        if not self._closing.is_set():
            self._closing.set()
            self._posts.put_nowait(None)
        self._thread.join(timeout_s)

    @property
    def _where(self) -> str:
        # Only the host: the path or query of a webhook URL may be a secret.
        return f"webhook at {urlsplit(self.url).netloc}"

    def _run(self) -> None:
        while (data := self._posts.get()) is not None:
            failure = self._try(data)
            for pause_s in RETRY_AFTER_S:
                if not failure or self._closing.wait(pause_s):
                    break
                failure = self._try(data)
            self.failure = f"{self._where}: {failure}" if failure else ""

    def _try(self, data: bytes) -> str:
        headers = {"Content-Type": "application/json", "User-Agent": "kvscope"}
        request = urllib.request.Request(self.url, data, headers, method="POST")
        try:
            with self._opener.open(request, timeout=TIMEOUT_S):
                return ""
        except urllib.error.HTTPError as error:
            error.close()
            return f"it answered {error.code} {error.reason}"
        except urllib.error.URLError as error:
            return str(getattr(error.reason, "strerror", None) or error.reason)
        except (OSError, http.client.HTTPException, ValueError) as error:
            return str(error) or type(error).__name__


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: urllib would turn a redirected POST into a GET to another address."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _time_text(time_ns: int) -> str:
    moment = datetime.fromtimestamp(time_ns // 1_000_000 / 1000, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
