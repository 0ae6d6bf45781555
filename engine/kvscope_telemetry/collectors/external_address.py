"""Addresses of external engines with their options, such as vllm://HOST:8000/?rank=1. Uses no sockets."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field, replace
from typing import Final
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit

from kvscope_telemetry.collectors.external_engine import ExternalEngine
from kvscope_telemetry.collectors.external_engines import each_engine, find_engine
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.kv_events.event_endpoints import check_endpoint, of_rank

MAX_RANK: Final = 4095
MAX_RANKS: Final = 64
"""Maximum number of ranks that one address may name with the option `ranks`."""
MAX_KEY_LETTERS: Final = 8192
EVERYWHERE: Final = ("*", "0.0.0.0", "[::]", "::")
_OPTIONS: Final = (
    "kv_events",
    "replay",
    "topic",
    "rank",
    "tls",
    "ca",
    "api_key_over_http",
    "model",
    "tokenizer",
    "kv_unified",
)


@dataclass(frozen=True, slots=True)
class ExternalAddress:
    """Address of one data-parallel rank of an external engine. `str()` returns text that `parse` accepts,
    without the API key.
    """

    engine: ExternalEngine
    host: str
    port: int
    path: str = ""
    """Path prefix of the server behind a gateway, such as "/engine1"."""
    tls: bool = False
    ca: str = ""
    """Path of the CA certificate that signed the server's certificate; empty for the system's certificates."""
    kv_events: str = ""
    """Endpoint of rank 0's KV events; empty for the endpoint that the server reports.

    If its host is `*`, kvscope binds it and waits for the publisher to connect.
    """
    replay: str = ""
    """Endpoint at which rank 0 replays past KV events; empty for the endpoint that the server reports."""
    topic: str = ""
    """Topic of the KV events, or its beginning; empty for that of the server."""
    rank: int = 0
    names_rank: bool = False
    """Whether the address has the option `rank`. If not, the lowest rank of the server is shown."""
    model: str = ""
    """Name of the model whose metrics are read; empty for the metrics of all models."""
    tokenizer: str = ""
    """Path of a tokenizer.json or its directory, or the name of a model; empty for the name of the served model."""
    kv_unified: str = ""
    """Whether the slots of a llama.cpp server share one KV cache (`--kv-unified`): "1" or "0"; empty if unknown."""
    api_key_over_http: bool = False
    is_announced: bool = False
    """Whether a watched engine announced this address. If so, it never gets an API key, because an engine could
    announce any server.
    """
    api_key: str = field(default="", repr=False)
    """API key for this scheme, host and port. Never displayed or recorded; only `authorization` may pass it on."""

    @classmethod
    def parse(
        cls,
        text: str,
        *,
        kv_events: str = "",
        replay: str = "",
        api_key: str = "",
        tls: bool = False,
        ca: str = "",
        api_key_over_http: bool = False,
    ) -> ExternalAddress:
        """Parse vllm://HOST:PORT, with options such as ?kv_events=tcp://HOST:5557&replay=tcp://HOST:5558&rank=0&tls=1.

        Keyword arguments override the options in the text. Raises BadInput for invalid text or options, and for an API
        key that would be sent to another machine without TLS, unless `api_key_over_http` allows it.
        """
        engine, parts, port = _split(text)
        options = _options(text, parts.query)
        address = cls(
            engine=engine,
            host=parts.hostname or "",
            port=port,
            path=parts.path.rstrip("/"),
            tls=tls or bool(ca) or _is_yes("tls", options.get("tls", "")) or "ca" in options,
            ca=ca or options.get("ca", ""),
            kv_events=kv_events or options.get("kv_events", ""),
            replay=replay or options.get("replay", ""),
            topic=options.get("topic", ""),
            rank=_rank(options.get("rank", "0")),
            names_rank="rank" in options,
            model=options.get("model", ""),
            tokenizer=options.get("tokenizer", ""),
            kv_unified=_kv_unified(engine, options.get("kv_unified", "")),
            api_key_over_http=api_key_over_http or _is_yes("api_key_over_http", options.get("api_key_over_http", "")),
            api_key=_checked_key(api_key),
        )
        address._check_endpoints()
        address._check_key_is_protected()
        return address

    def __str__(self) -> str:
        options = {
            "kv_events": self.kv_events,
            "replay": self.replay,
            "topic": self.topic,
            "rank": str(self.rank) if self.rank or self.names_rank else "",
            "tls": "1" if self.tls and not self.ca else "",
            "ca": self.ca,
            "api_key_over_http": "1" if self.api_key_over_http else "",
            "model": self.model,
            "tokenizer": self.tokenizer,
            "kv_unified": self.kv_unified,
        }
        query = urlencode({name: value for name, value in options.items() if value}, safe=":/*[]@")
        return f"{self.engine.scheme}://{self.authority}{self.path}" + (f"/?{query}" if query else "")

    @property
    def name(self) -> str:
        """Address and rank for display, without options."""
        return f"{self.engine.scheme}://{self.authority}{self.path}" + (f" rank {self.rank}" if self.rank else "")

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
        if not self.api_key or self.is_announced or not self._protects_key:
            return {}
        return {"Authorization": f"Bearer {self.api_key}"}

    @property
    def refusal(self) -> str:
        """Explanation for users why this server answers with status 401 or 403, and what to do; the end of a
        sentence.
        """
        if self.is_announced:
            return (
                "needs an API key, which is not sent to an address that an engine reports: attach to "
                f"{self.engine.scheme}://{self.authority} with --api-key-file to send prompts"
            )
        return "does not accept the API key" if self.api_key else "needs an API key: use --api-key-file"

    @property
    def _protects_key(self) -> bool:
        return self.tls or self.is_loopback or self.api_key_over_http

    def _check_key_is_protected(self) -> None:
        if self.api_key and not self._protects_key:
            raise BadInput(
                f"the API key is not sent to {self.authority} unencrypted: use --tls, or allow it with "
                "--api-key-over-http (in an address: ?api_key_over_http=1)"
            )

    def url(self, path: str) -> str:
        return f"{'https' if self.tls else 'http'}://{self.authority}{self.path}{path}"

    def of_rank(self, rank: int) -> ExternalAddress:
        return replace(self, rank=rank)

    def endpoint(self, base: str) -> str:
        """Return the endpoint of this rank, derived from rank 0's endpoint `base`."""
        return of_rank(base, self.rank)

    def on_this_host(self, endpoint: str) -> str:
        """Return the endpoint to which kvscope connects, given the endpoint that the server binds. A wildcard
        host is replaced by the server's host.
        """
        scheme, _, host_and_port = endpoint.partition("://")
        host, _, port = host_and_port.rpartition(":")
        return f"{scheme}://{self.bracketed_host}:{port}" if scheme == "tcp" and host in EVERYWHERE else endpoint

    def _check_endpoints(self) -> None:
        for name, endpoint in (("kv_events", self.kv_events), ("replay", self.replay)):
            if endpoint:
                check_endpoint(name, endpoint, is_client=name == "replay" or not waits_for_publisher(endpoint))
                self.endpoint(endpoint)
        if self.replay and not self.kv_events:
            raise BadInput(f"replay={self.replay!r} is not accepted without kv_events: the endpoint that is replayed")


def each_rank(text: str) -> list[str]:
    """Expand an address with the option `ranks=N` to the addresses of ranks 0 to N - 1. Other addresses are returned
    unchanged.

    Raises BadInput for an invalid number, or if the address also has the option `rank`.
    """
    base, _, query = text.partition("?")
    options = query.split("&")
    counts = [option.partition("=")[2] for option in options if option.startswith("ranks=")]
    if not counts:
        return [text]
    others = [option for option in options if not option.startswith("ranks=")]
    number = counts[0]
    is_number = number.isascii() and number.isdigit() and len(number) <= len(str(MAX_RANKS))
    if not is_number or not 1 <= int(number) <= MAX_RANKS or len(counts) > 1:
        raise BadInput(f"ranks={number!r} is not accepted: how many data-parallel ranks there are, 1 to {MAX_RANKS}")
    if any(option.startswith("rank=") for option in others):
        raise BadInput(f"address {text!r} is not accepted: rank or ranks, not both")
    return [f"{base}?{'&'.join([*others, f'rank={rank}'])}" for rank in range(int(number))]


def waits_for_publisher(endpoint: str) -> bool:
    """Return whether kvscope binds `endpoint` and the publisher connects to it; otherwise kvscope connects."""
    scheme, _, host_and_port = endpoint.partition("://")
    return scheme == "tcp" and host_and_port.rpartition(":")[0] in EVERYWHERE


def _split(text: str) -> tuple[ExternalEngine, SplitResult, int]:
    expected = f"{each_engine('{scheme}://HOST:PORT')}, the port that its HTTP API is at"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise BadInput(f"address {text!r} is not accepted: {expected}") from None
    is_printable = text.isprintable() and not any(letter.isspace() for letter in text)
    if "@" in parts.netloc or parts.password is not None:
        raise BadInput("an address with a user name or key before its host is not accepted: use --api-key-file")
    engine = find_engine(parts.scheme)
    if engine is None or not parts.hostname or not port or parts.fragment or not is_printable:
        raise BadInput(f"address {text!r} is not accepted: {expected}")
    return engine, parts, port


def _options(text: str, query: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name == "api_key":
            raise BadInput("api_key in an address is not accepted, because addresses are displayed: use --api-key-file")
        if name == "ranks":
            raise BadInput(f"ranks={value!r} is not accepted here: one address is, with the rank=NUMBER that is meant")
        if name not in _OPTIONS or name in options:
            raise BadInput(f"option {name!r} of address {text!r} is not accepted: once each of {', '.join(_OPTIONS)}")
        options[name] = value
    return options


def _rank(value: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) <= len(str(MAX_RANK)) and int(value) <= MAX_RANK):
        raise BadInput(f"rank={value!r} is not accepted: the number of a data-parallel rank, 0 to {MAX_RANK}")
    return int(value)


def _kv_unified(engine: ExternalEngine, value: str) -> str:
    if value and not engine.publishes_slots:
        raise BadInput(f"kv_unified={value!r} is not accepted for {engine.name}: it is an option of llama.cpp's slots")
    _is_yes("kv_unified", value)
    return value


def _is_yes(name: str, value: str) -> bool:
    if value not in ("", "0", "1"):
        raise BadInput(f"{name}={value!r} is not accepted: 0 or 1")
    return value == "1"


def _checked_key(key: str) -> str:
    if len(key) > MAX_KEY_LETTERS or not key.isascii() or not key.isprintable() or " " in key:
        raise BadInput("the API key is not accepted: printable ASCII without spaces")
    return key
