"""Sends prompts to vLLM or SGLang with kvscope's plugin, through the OpenAI API whose address their `Hello` message
announces.

Owns the API's address as seen from this machine, and the prompts in progress. No API key is sent to an announced
address, because an attacker who controls the telemetry could announce any server. To use a server that requires a key,
attach to the server's own address.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Final

from kvscope_telemetry.collectors.external_address import EVERYWHERE, ExternalAddress
from kvscope_telemetry.collectors.prompting.prompter import Prompter
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import Abort, EstimatePrompt, GetStatus, LoadedAdapter, Reply, Submit, refuse

_SSH: Final = "ssh://"
_LOCAL: Final = ("localhost", "127.", "::1")


class OwnApi:
    """Client of the OpenAI API of the engine whose telemetry endpoint is `endpoint`. Thread-safe and non-blocking."""

    def __init__(self, endpoint: str, *, ca_file: Path | None = None) -> None:
        self._endpoint, self._ca = endpoint, ca_file
        self._lock = threading.Lock()
        self._announced_api: tuple[str, bool] = ("", False)
        self._prompter: Prompter | None = None
        self._refusals: list[Reply] = []

    @property
    def adapters(self) -> tuple[LoadedAdapter, ...] | None:
        """LoRA adapters as in `Prompter.adapters`; None before the server has answered."""
        return None if self._prompter is None else self._prompter.adapters

    def send(self, command: Submit | EstimatePrompt | GetStatus, announced: str, *, is_same_machine: bool) -> None:
        """Send a prompt, a prompt to estimate or a status query to the API that the engine's `Hello` announced.

        Replies are returned by `poll_replies`. Raises BadInput for a prompt that is too large.
        """
        with self._lock:
            try:
                prompter = self._prompter_of(announced, is_same_machine)
            except BadInput as error:
                if not isinstance(command, GetStatus):
                    self._refusals.append(refuse(command, str(error)))
                return
        prompter.send(command)

    def abort(self, abort: Abort) -> bool:
        """Abort a prompt. Returns False if this client is not running it."""
        prompter = self._prompter
        if prompter is None or not prompter.has(abort.request_id):
            return False
        prompter.send(abort)
        return True

    def poll_replies(self) -> list[Reply]:
        with self._lock:
            refusals, self._refusals = self._refusals, []
            return refusals + (self._prompter.poll_replies() if self._prompter is not None else [])

    def close(self) -> None:
        """Abort all requests; takes up to two seconds."""
        with self._lock:
            if self._prompter is not None:
                self._prompter.close()

    def _prompter_of(self, announced: str, is_same_machine: bool) -> Prompter:
        """Return a prompter for the announced address. It replaces the prompter of a previously announced address."""
        if self._prompter is None or self._announced_api != (announced, is_same_machine):
            address = reachable_address(announced, self._endpoint, is_same_machine=is_same_machine)
            ca = "" if self._ca is None else str(self._ca.expanduser())
            if self._prompter is not None:
                self._prompter.close()
            self._prompter = Prompter(replace(address, ca=ca))
            self._announced_api = (announced, is_same_machine)
        return self._prompter


def reachable_address(announced: str, endpoint: str, *, is_same_machine: bool) -> ExternalAddress:
    """Return the address at which a client attached at `endpoint` can reach the API `announced` by the engine.

    Options in `announced` that name other servers or local files are ignored, because they are not trusted. Raises
    BadInput with a message for users if the API cannot be reached.
    """
    api = ExternalAddress.parse(announced)
    address = ExternalAddress(
        host=api.host, port=api.port, path=api.path, tls=api.tls, engine=api.engine, rank=api.rank, is_announced=True
    )
    name = api.engine.name
    prompts = f"prompts go to {name}'s own API at {api.authority}"
    if endpoint.startswith(_SSH):
        forwarded = f"{api.engine.scheme}://127.0.0.1:{api.port}"
        raise BadInput(
            f"{prompts}, a port that this ssh connection does not forward: forward it, and attach to {forwarded}"
        )
    attached_host = _host_of(endpoint)
    if api.host in EVERYWHERE:
        if not is_same_machine and _is_local(attached_host):
            raise BadInput(f"{prompts} on another machine, whose address is not known here: attach to {name} as well")
        return replace(address, host="127.0.0.1" if is_same_machine else attached_host)
    if _is_local(api.host) and not is_same_machine:
        raise BadInput(f"{prompts}, which can be reached only from its own machine")
    return address


def _host_of(endpoint: str) -> str:
    scheme, _, host_and_port = endpoint.partition("://")
    return host_and_port.rpartition(":")[0].strip("[]") if scheme == "tcp" else ""


def _is_local(host: str) -> bool:
    return not host or host.startswith(_LOCAL)
