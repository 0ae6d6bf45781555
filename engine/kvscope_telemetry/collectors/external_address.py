"""Addresses of external engines with their options, such as vllm://HOST:8000/?rank=1. Uses no sockets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit

from kvscope_telemetry.collectors.external_engine import ExternalEngine
from kvscope_telemetry.collectors.external_engines import each_engine, find_engine
from kvscope_telemetry.collectors.server_address import ServerAddress, checked_key, is_yes
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.kv_events.event_endpoints import check_endpoint, of_rank

MAX_RANK: Final = 4095
MAX_RANKS: Final = 64
"""Maximum number of ranks that one address may name with the option `ranks`."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalAddress(ServerAddress):
    """Address of one data-parallel rank of an external engine. `str()` returns text that `parse` accepts,
    without the API key.
    """

    engine: ExternalEngine
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
    is_forwarded: bool = False
    """Whether only the port of the HTTP server is forwarded to this host. Other ports here are those of other programs,
    so that the KV events that the server reports cannot be received.
    """

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
            tls=tls or bool(ca) or is_yes("tls", options.get("tls", "")) or "ca" in options,
            ca=ca or options.get("ca", ""),
            kv_events=kv_events or options.get("kv_events", ""),
            replay=replay or options.get("replay", ""),
            topic=options.get("topic", ""),
            rank=_rank(options.get("rank", "0")),
            names_rank="rank" in options,
            model=options.get("model", ""),
            tokenizer=options.get("tokenizer", ""),
            kv_unified=_kv_unified(engine, options.get("kv_unified", "")),
            api_key_over_http=api_key_over_http or is_yes("api_key_over_http", options.get("api_key_over_http", "")),
            api_key=checked_key(api_key),
        )
        address._check_endpoints()
        address.check_key_is_protected()
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
    def refusal(self) -> str:
        if self.is_announced:
            return (
                "needs an API key, which is not sent to an address that an engine reports: attach to "
                f"{self.engine.scheme}://{self.authority} with --api-key-file to send prompts"
            )
        return self._key_refusal

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
    is_yes("kv_unified", value)
    return value
