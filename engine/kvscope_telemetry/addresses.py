"""Maps an address to the source that watches the engine there. No other module distinguishes kinds of addresses.

    ipc:///DIR/telemetry, tcp://HOST:PORT       kvscope's own engine
    ssh://[USER@]HOST[:PORT][/ENDPOINT]         kvscope's own engine on another machine, through OpenSSH
    vllm://HOST:PORT, sglang://HOST:PORT, ...    external engines (`external_engines.py`), by their HTTP server
    prometheus://HOST:PORT?job=JOB              an engine that a Prometheus server scrapes
    k8s://NAMESPACE/SELECTOR?pod=NAME&...       an external engine in a pod, through kubectl

The module of an external engine's source is imported when such a source is opened. Secrets appear in no repr and in no
name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Protocol, Self
from urllib.parse import urlsplit

from kvscope_telemetry.collectors.external_engines import each_engine, find_engine
from kvscope_telemetry.collectors.kubernetes.pod_address import SCHEME as KUBERNETES
from kvscope_telemetry.collectors.prometheus.prometheus_address import SCHEME as PROMETHEUS
from kvscope_telemetry.credentials.private_files import MAX_BYTES
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.source import Source, Update
from kvscope_telemetry.sources.live_source import LiveSource
from kvscope_telemetry.sources.sink import Sink
from kvscope_telemetry.transport.connections import key_for
from kvscope_telemetry.transport.endpoints import require_curve
from kvscope_telemetry.transport.ssh_tunnel import SCHEME, SYNTAX, require_ssh

if TYPE_CHECKING:
    from kvscope_telemetry.collectors.external_address import ExternalAddress
    from kvscope_telemetry.collectors.kubernetes.pod_address import PodAddress
    from kvscope_telemetry.collectors.own_api import OwnApi
    from kvscope_telemetry.collectors.prometheus.prometheus_address import PrometheusAddress

OWN_SCHEMES: Final = ("ipc", "tcp", "ssh")
API_KEY_VARIABLE: Final = "KVSCOPE_API_KEY"
"""Environment variable with the API key, used if no key file is given.

There is no command-line option for the key itself, because other users of the machine could read it.
"""


def accepted_addresses() -> str:
    engines = each_engine("{scheme}://HOST:PORT")
    return (
        f"ipc:///DIR, tcp://HOST:PORT, {SYNTAX}, {PROMETHEUS}://HOST:PORT?job=JOB, {KUBERNETES}://NAMESPACE/SELECTOR, "
        f"{engines}"
    )


class WatchedSource(Source, Protocol):
    """A live source with a mirror of the engine's state. Its messages can be recorded."""

    mirror: Mirror

    def update_mirror(self) -> Update | None:
        """Apply the messages received since the last call to `mirror`.

        Returns the applied update; None if there are no new messages.
        """

    def resync(self) -> None:
        """Request a snapshot of the complete state, because an update could not be applied."""

    def set_sink(self, sink: Sink | None) -> None:
        """Pass all messages received from then on to `sink`, or to no sink if None."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Address:
    text: str
    key: Path | None = None
    """Key file for kvscope's own engine. None for the key stored for this engine or, if there is none, the
    user's default key.
    """
    kv_events: str = ""
    """Endpoint of an external engine's KV events; empty for the endpoint that the engine announces."""
    api_key: str = field(default="", repr=False)
    """API key for an external engine's HTTP server at this address. It is never sent to an address that an
    engine announces.
    """
    tls: bool = False
    ca_file: Path | None = None
    """PEM file of additional trusted certificate authorities."""
    api_key_over_http: bool = False
    """Whether the API key may be sent to another machine without TLS."""

    @property
    def scheme(self) -> str:
        scheme, separator, _ = self.text.partition("://")
        return scheme if separator else ""

    @property
    def is_external(self) -> bool:
        """Whether an HTTP server is asked: that of an external engine, also in a pod, or Prometheus."""
        return find_engine(self.scheme) is not None or self.is_prometheus or self.is_pod

    @property
    def is_prometheus(self) -> bool:
        return self.scheme == PROMETHEUS

    @property
    def is_pod(self) -> bool:
        return self.scheme == KUBERNETES

    def check(self) -> None:
        """Raise BadInput if the address cannot be opened. Makes no connection.

        The error names the invalid value and the accepted ones.
        """
        if self.is_external:
            self._check_options_of_external()
            if self.is_prometheus:
                prometheus_address(self)
            elif self.is_pod:
                pod_address(self)
            else:
                external_address(self)
        elif self.scheme in OWN_SCHEMES:
            self._check_options_of_own()
            self._check_ca_file()
            if self.scheme == SCHEME:
                require_ssh()
            require_curve(self.text, has_keys=key_for(self.text, self.key) is not None)
        else:
            hint = _hint(self)
            raise BadInput(f"address {self.text!r} is not accepted: {hint or accepted_addresses()}")

    def open(self, sink: Sink | None = None, *, past_s: int = 0) -> WatchedSource:
        """Return a source that watches the engine. The engine may start later. Raises BadInput like `check`.

        `past_s`: seconds before now to read if the engine's past is known, which is so with Prometheus.
        """
        self.check()
        if self.is_prometheus:
            from kvscope_telemetry.collectors.prometheus.prometheus_source import PrometheusSource

            return PrometheusSource(prometheus_address(self), past_s=past_s, sink=sink)
        if self.is_pod:
            from kvscope_telemetry.collectors.kubernetes.pod_source import open_pod

            return open_pod(pod_address(self), api_key=self.api_key, sink=sink)
        if not self.is_external:
            return LiveSource(self.text, key=self.key, sink=sink, make_prompt_api=self._own_api)
        if self._publishes_slots:
            from kvscope_telemetry.collectors.slot_source import SlotSource

            return SlotSource(external_address(self), sink=sink)
        from kvscope_telemetry.collectors.external_source import ExternalSource

        return ExternalSource(external_address(self), sink=sink)

    def _own_api(self) -> OwnApi:
        from kvscope_telemetry.collectors.own_api import OwnApi

        return OwnApi(self.text, ca_file=self.ca_file)

    @property
    def _publishes_slots(self) -> bool:
        engine = find_engine(self.scheme)
        return engine is not None and engine.publishes_slots

    def _check_options_of_own(self) -> None:
        options = (
            ("--kv-events", self.kv_events),
            ("--tls", self.tls),
            ("--api-key-file", self.api_key),
            ("--api-key-over-http", self.api_key_over_http),
        )
        for name, value in options:
            if value:
                engines = each_engine("{scheme}://", "and", with_events=name == "--kv-events")
                raise BadInput(f"{name} is for {engines}, and does not go with {self.text}")

    def _check_options_of_external(self) -> None:
        if self.kv_events and (self._publishes_slots or self.is_prometheus or self.is_pod):
            engines = each_engine("{scheme}://", "and", with_events=True)
            raise BadInput(f"--kv-events is for {engines}, and does not go with {self.text}")
        if self.key is not None:
            raise BadInput(f"--key is for engines of kvscope's own and does not go with {self.text}")
        if self.is_pod:
            self._check_options_of_pod()
        self._check_ca_file()

    def _check_options_of_pod(self) -> None:
        options = (
            ("--tls-ca", self.ca_file),
            ("--tls", self.tls),
            ("--api-key-over-http", self.api_key_over_http),
        )
        for name, value in options:
            if value:
                raise BadInput(f"{name} does not go with {self.text}: kubectl forwards the port")

    def _check_ca_file(self) -> None:
        if self.ca_file is not None and not self.ca_file.expanduser().is_file():
            raise BadInput(f"--tls-ca {str(self.ca_file)!r} is not accepted: must be a file of certificates (PEM)")


def open_source(
    address: str,
    *,
    key: Path | None = None,
    kv_events: str = "",
    api_key: str = "",
    tls: bool = False,
    ca_file: Path | None = None,
    api_key_over_http: bool = False,
    sink: Sink | None = None,
) -> WatchedSource:
    """Watch the engine at `address`: `with open_source("vllm://HOST:PORT") as source:`. Exported as
    `kvscope_telemetry.connect`.

    Args:
        sink: Receives all messages, for recording.

    The other arguments are the fields of `Address`.

    Raises:
        BadInput: if an argument is invalid.
    """
    return Address(address, key, kv_events, api_key, tls, ca_file, api_key_over_http).open(sink)


def each_rank(text: str) -> list[str]:
    """Expand `vllm://HOST:PORT/?ranks=4` to the addresses of its four data-parallel ranks. Other addresses are returned
    unchanged.

    Raises:
        BadInput: for an invalid number of ranks, or `rank` combined with `ranks`.
    """
    if find_engine(Address(text).scheme) is None or "ranks=" not in text:
        return [text]
    from kvscope_telemetry.collectors.external_address import each_rank

    return each_rank(text)


def read_api_key(path: Path | None) -> str:
    """Return the API key in the file at `path`, or in the environment if `path` is None; "" if there is none.
    Raises BadInput if the file cannot be read or contains no valid key.
    """
    if path is None:
        return os.environ.get(API_KEY_VARIABLE, "").strip()
    try:
        with path.expanduser().open(encoding="utf-8") as file:
            text = file.read(MAX_BYTES).strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise BadInput(f"--api-key-file {str(path)!r} cannot be read: {reason}") from None
    if not text or any(not 32 < ord(letter) < 127 for letter in text):
        raise BadInput(f"--api-key-file {str(path)!r} is not accepted: one line with the key, without spaces")
    return text


def saved_key(keys: Mapping[str, str], address: str) -> str:
    """Return the key saved for `address` in `keys`; "" if there is none. The engines that a Prometheus server knows are
    all read from that server, so a key saved for any address of the server is for all of them.
    """
    if address in keys:
        return keys[address]
    server = _prometheus_server(address)
    return next((key for known, key in keys.items() if server and _prometheus_server(known) == server), "")


def external_address(address: Address) -> ExternalAddress:
    from kvscope_telemetry.collectors.external_address import ExternalAddress

    return ExternalAddress.parse(
        address.text,
        kv_events=address.kv_events,
        api_key=address.api_key,
        tls=address.tls,
        ca="" if address.ca_file is None else str(address.ca_file.expanduser()),
        api_key_over_http=address.api_key_over_http,
    )


def prometheus_address(address: Address) -> PrometheusAddress:
    from kvscope_telemetry.collectors.prometheus.prometheus_address import PrometheusAddress

    return PrometheusAddress.parse(
        address.text,
        api_key=address.api_key,
        tls=address.tls,
        ca="" if address.ca_file is None else str(address.ca_file.expanduser()),
        api_key_over_http=address.api_key_over_http,
    )


def pod_address(address: Address) -> PodAddress:
    from kvscope_telemetry.collectors.kubernetes.pod_address import PodAddress

    return PodAddress.parse(address.text)


def _hint(address: Address) -> str:
    if address.scheme in ("http", "https"):
        host_and_path = address.text.partition("://")[2].rstrip("/")
        tls = " with --tls" if address.scheme == "https" else ""
        return f"say which engine it is, {each_engine('{scheme}://')}{tls}".replace("://", f"://{host_and_path}")
    return ""


def _prometheus_server(address: str) -> tuple[str, ...]:
    """Return host and path of the Prometheus server at `address`; () if it is another address."""
    try:
        parts = urlsplit(address)
    except ValueError:
        return ()
    return (parts.netloc, parts.path.rstrip("/")) if parts.scheme == PROMETHEUS else ()
