"""Address of an HTTP server, and the rules by which its API key may be sent. Uses no sockets."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import Final

from kvscope_telemetry.errors import BadInput

MAX_KEY_LETTERS: Final = 8192


@dataclass(frozen=True, slots=True)
class ServerAddress:
    host: str
    port: int
    path: str = ""
    """Path prefix of the server behind a gateway, such as "/engine1"."""
    tls: bool = False
    ca: str = ""
    """Path of the CA certificate that signed the server's certificate; empty for the system's certificates."""
    api_key_over_http: bool = False
    is_announced: bool = False
    """Whether a watched engine announced this address. If so, it never gets an API key, because an engine could
    announce any server.
    """
    api_key: str = field(default="", repr=False)
    """API key for this scheme, host and port. Never displayed or recorded; only `authorization` may pass it on."""

    @property
    def bracketed_host(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host

    @property
    def authority(self) -> str:
        return f"{self.bracketed_host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether the host is this machine by definition: localhost, 127.0.0.0/8 or ::1."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def authorization(self) -> dict[str, str]:
        """HTTP headers with the API key for this server; empty if there is none or it may not be sent.

        All requests to watched servers must use these headers, so that the rules for sending the key are enforced in
        one place.
        """
        return self._bearer

    @property
    def _bearer(self) -> dict[str, str]:
        if not self.api_key or self.is_announced or not self._protects_key:
            return {}
        return {"Authorization": f"Bearer {self.api_key}"}

    @property
    def refusal(self) -> str:
        """Explanation for users why this server answers with status 401 or 403, and what to do; the end of a
        sentence.
        """
        return self._key_refusal

    @property
    def _key_refusal(self) -> str:
        return "does not accept the API key" if self.api_key else "needs an API key: use --api-key-file"

    def url(self, path: str) -> str:
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.path}{path}"

    @property
    def _protects_key(self) -> bool:
        return self.tls or self.is_loopback or self.api_key_over_http

    def check_key_is_protected(self) -> None:
        """Raise BadInput if the API key would be sent to another machine without TLS, unless that is allowed."""
        if self.api_key and not self._protects_key:
            raise BadInput(
                f"the API key is not sent to {self.authority} unencrypted: use --tls, or allow it with "
                "--api-key-over-http (in an address: ?api_key_over_http=1)"
            )


def is_yes(name: str, value: str) -> bool:
    if value not in ("", "0", "1"):
        raise BadInput(f"{name}={value!r} is not accepted: 0 or 1")
    return value == "1"


def checked_key(key: str) -> str:
    if len(key) > MAX_KEY_LETTERS or not key.isascii() or not key.isprintable() or " " in key:
        raise BadInput("the API key is not accepted: printable ASCII without spaces")
    return key
