"""What a person reads where an engine's HTTP server gave no answer, in one sentence each. Knows no sockets."""

from __future__ import annotations

import http.client
import socket
import ssl
from typing import Final

REFUSALS: Final = (401, 403)
"""There is a server, and it does not let us in."""
_REDIRECTS: Final = range(300, 400)


def why_refused(url: str, status: int, *, has_key: bool) -> str:
    """By HTTP's status, which is none of a success."""
    if status in REFUSALS:
        asked = "does not accept the API key" if has_key else "needs an API key: use --api-key-file"
        return f"{url} {asked} (HTTP {status})"
    if status in _REDIRECTS:
        return f"{url} redirects (HTTP {status}), which is not followed: use the server's own address"
    if status == http.client.NOT_FOUND:
        return f"{url} not found (HTTP 404)"
    return f"{url} answers with HTTP {status}"


def why_no_stream(url: str, status: int, kind: str, words: str, *, has_key: bool) -> str:
    """Where a stream of events was asked for: by HTTP's status, the content's type, and what the server says."""
    if status == http.client.OK:
        what = "a web page" if kind == "text/html" else f"{kind:.60}"
        return f"{url} answers with {what} instead of an event stream: is it another program's port?"
    if words:
        return f"{url} answers with HTTP {status}: {words}"
    return why_refused(url, status, has_key=has_key)


def why_late(url: str, timeout_s: float) -> str:
    """It took longer than that."""
    return f"{url} did not answer within {timeout_s:g} s"


def why_broken(url: str, error: Exception) -> str:
    """By what went wrong with the connection."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"{url}: its certificate is not trusted ({error.verify_message}); use --tls-ca FILE with its "
            "certificate authority"
        )
    if isinstance(error, ssl.SSLError):
        return f"{url}: TLS failed ({error.reason or 'the connection broke'}): does this server use TLS (--tls)?"
    if isinstance(error, ConnectionRefusedError):
        return f"nobody listens at {url}"
    if isinstance(error, socket.gaierror):
        return f"{url}: unknown host"
    if isinstance(error, http.client.RemoteDisconnected | http.client.IncompleteRead | ConnectionError):
        return f"{url} closed the connection before its answer was complete"
    if isinstance(error, http.client.HTTPException):
        return f"{url} does not answer in HTTP ({type(error).__name__}): is it another port?"
    return f"{url} cannot be reached ({getattr(error, 'strerror', None) or type(error).__name__})"
