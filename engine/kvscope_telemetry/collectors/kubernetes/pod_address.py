"""Addresses of engines in pods, such as k8s://llm/app=vllm?pod=vllm-0&engine=vllm&port=8000. Starts no program."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from kvscope_telemetry.collectors.external_engines import ENGINES, find_engine
from kvscope_telemetry.errors import BadInput

SCHEME: Final = "k8s"
SYNTAX: Final = "k8s://NAMESPACE/SELECTOR"
_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_SELECTOR: Final = re.compile(r"[\w./=!, ()-]{0,500}", re.ASCII)
"""Accepted label selectors. They never begin with a minus sign, which would be an option of kubectl."""
_CONTEXT: Final = re.compile(r"[\w./:@-]{1,253}", re.ASCII)
_OPTIONS: Final = ("pod", "engine", "port", "context")
MAX_PORT: Final = 65_535


@dataclass(frozen=True, slots=True)
class PodAddress:
    """A namespace and a label selector and, if `pod` is set, one engine of those that they select."""

    namespace: str
    selector: str = ""
    """Label selector of kubectl, such as "app=vllm,tier=gpu"; empty for all pods."""
    pod: str = ""
    engine: str = ""
    """Scheme of the external engine in the pod."""
    port: int = 0
    """Port of the engine's HTTP server in the pod."""
    context: str = ""
    """Context of kubectl's configuration; empty for the current one."""

    @classmethod
    def parse(cls, text: str) -> PodAddress:
        """Parse an address. Raises BadInput, which names the invalid part."""
        try:
            parts = urlsplit(text)
        except ValueError:
            raise _not_accepted(text) from None
        namespace, selector = parts.netloc, unquote(parts.path.strip("/"))
        if parts.scheme != SCHEME or not _NAME.fullmatch(namespace) or parts.fragment:
            raise _not_accepted(text)
        if not _SELECTOR.fullmatch(selector) or selector.startswith("-"):
            raise BadInput(f"selector {selector!r} of address {text!r} is not accepted: labels such as app=vllm")
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        unknown = next((name for name in options if name not in _OPTIONS), None)
        if unknown is not None:
            raise BadInput(f"option {unknown!r} of address {text!r} is not accepted: one of {', '.join(_OPTIONS)}")
        address = cls(
            namespace,
            selector,
            options.get("pod", ""),
            options.get("engine", ""),
            _port(options.get("port", "")),
            options.get("context", ""),
        )
        address._check()
        return address

    def __str__(self) -> str:
        options = {
            "pod": self.pod,
            "engine": self.engine,
            "port": str(self.port) if self.port else "",
            "context": self.context,
        }
        query = urlencode({name: value for name, value in options.items() if value}, safe=":/@")
        path = quote(self.selector, safe="=,!()./")
        return f"{SCHEME}://{self.namespace}/{path}" + (f"?{query}" if query else "")

    @property
    def name(self) -> str:
        """Namespace and pod for display."""
        return f"{SCHEME}://{self.namespace}/{self.pod or self.selector}"

    def require_engine(self) -> None:
        """Raise BadInput if the address does not name one engine."""
        if not (self.pod and self.engine and self.port):
            raise BadInput(
                f"address '{self}' is not accepted here: it must name one pod; `kvscope find '{self}'` lists them"
            )

    def _check(self) -> None:
        if self.pod and not _NAME.fullmatch(self.pod):
            raise BadInput(f"pod={self.pod!r} is not accepted: the name of a pod")
        if self.engine and find_engine(self.engine) is None:
            raise BadInput(
                f"engine={self.engine!r} is not accepted: one of {', '.join(each.scheme for each in ENGINES)}"
            )
        if self.context and (not _CONTEXT.fullmatch(self.context) or self.context.startswith("-")):
            raise BadInput(f"context={self.context!r} is not accepted: the name of a context of kubectl")


def _port(value: str) -> int:
    if not value:
        return 0
    if not (value.isascii() and value.isdigit() and len(value) <= 5 and 1 <= int(value) <= MAX_PORT):
        raise BadInput(f"port={value!r} is not accepted: a port from 1 to {MAX_PORT}")
    return int(value)


def _not_accepted(text: str) -> BadInput:
    return BadInput(f"address {text!r} is not accepted: {SYNTAX}, such as k8s://llm/app=vllm")
