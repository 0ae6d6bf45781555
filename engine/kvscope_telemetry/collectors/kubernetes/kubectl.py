"""Runs the user's `kubectl`: lists the pods with engines, and builds the command of a port forwarding.

An engine is recognized by the name of a container's image, or by the program in its command. No request is sent to a
pod.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from kvscope_telemetry.collectors import external_engines
from kvscope_telemetry.collectors.external_engine import ExternalEngine
from kvscope_telemetry.collectors.kubernetes.pod_address import MAX_PORT, PodAddress
from kvscope_telemetry.collectors.server_facts import mapping
from kvscope_telemetry.errors import BadInput, KvscopeError

TIMEOUT_S: Final = 15.0
MAX_BYTES: Final = 64 << 20
_PORT_OPTION: Final = re.compile(r"--port[= ](\d{1,5})(?!\S)")
_ENDED: Final = ("Succeeded", "Failed")
"""Phases of pods whose containers have all ended."""
_MAX_ERROR_LETTERS: Final = 300


@dataclass(frozen=True, slots=True)
class EnginePod:
    address: PodAddress
    engine: ExternalEngine
    phase: str
    """Phase of the pod, such as "Running" or "Pending"."""


def find_pods(address: PodAddress) -> list[EnginePod]:
    """Return the engines in the selected pods, sorted by name. Takes up to `TIMEOUT_S` seconds.

    Raises:
        BadInput: without kubectl.
        KvscopeError: if kubectl fails; the message is its own.
    """
    selection = ["--selector", address.selector] if address.selector else []
    output = _run([*_command(address), "get", "pods", *selection, "--output=json", f"--request-timeout={TIMEOUT_S:g}s"])
    try:
        items = mapping(msgspec.json.decode(output)).get("items")
    except (msgspec.DecodeError, RecursionError):
        raise KvscopeError("kubectl printed no list of pods") from None
    pods = [pod for item in items or () for pod in _engines_of(address, mapping(item))]
    return sorted(pods, key=lambda pod: (pod.address.pod, pod.address.port))


def forward_command(address: PodAddress, local_port: int) -> list[str]:
    """Return the command that forwards `local_port` of this machine to the engine. Raises BadInput without kubectl."""
    ports = f"{local_port}:{address.port}"
    return [*_command(address), "port-forward", "--address=127.0.0.1", f"pod/{address.pod}", ports]


def _command(address: PodAddress) -> list[str]:
    program = shutil.which("kubectl")
    if program is None:
        raise BadInput(f"{address.name} needs kubectl, which is not on PATH")
    context = [f"--context={address.context}"] if address.context else []
    return [program, *context, f"--namespace={address.namespace}"]


def _run(command: list[str]) -> bytes:
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise KvscopeError(f"kubectl did not answer within {TIMEOUT_S:g} s") from None
    except OSError as error:
        raise KvscopeError(f"kubectl cannot be run: {error.strerror}") from None
    if done.returncode:
        raise KvscopeError(f"kubectl: {error_text(done.stderr)}")
    if len(done.stdout) > MAX_BYTES:
        raise KvscopeError(f"kubectl printed more than {MAX_BYTES >> 20} MB: select fewer pods")
    return done.stdout


def error_text(output: bytes) -> str:
    """Return the last line that kubectl printed, which says why it failed."""
    lines = [" ".join(line.split()) for line in output.decode("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1][:_MAX_ERROR_LETTERS] if lines else "it failed without a message"


def _engines_of(address: PodAddress, item: Mapping[str, Any]) -> Iterator[EnginePod]:
    name = mapping(item.get("metadata")).get("name")
    phase = mapping(item.get("status")).get("phase")
    if phase in _ENDED:
        return
    containers = mapping(item.get("spec")).get("containers")
    for container in containers if isinstance(containers, list) else ():
        found = _engine_in(mapping(container))
        if found is not None and isinstance(name, str):
            engine, port = found
            pod = replace(address, pod=name, engine=engine.scheme, port=port)
            if address.pod in ("", name):
                yield EnginePod(PodAddress.parse(str(pod)), engine, phase if isinstance(phase, str) else "")


def _engine_in(container: Mapping[str, Any]) -> tuple[ExternalEngine, int] | None:
    """Return the engine of a container and the port of its server; None if there is no engine that kvscope knows."""
    image, text = container.get("image"), _command_line(container)
    engine = _engine_of_image(image if isinstance(image, str) else "") or _engine_of_command(text)
    if engine is None:
        return None
    ports = container.get("ports")
    listed = [mapping(port).get("containerPort") for port in (ports if isinstance(ports, list) else ())]
    option = _PORT_OPTION.search(text)
    if option is not None and 1 <= int(option[1]) <= MAX_PORT:
        return engine, int(option[1])
    numbers = [port for port in listed if isinstance(port, int) and 1 <= port <= MAX_PORT]
    return engine, engine.port if engine.port in numbers or not numbers else numbers[0]


def _engine_of_image(image: str) -> ExternalEngine | None:
    name = image.rpartition("/")[2]
    return next((each for each in external_engines.ENGINES if any(n in name for n in each.program_names)), None)


def _engine_of_command(text: str) -> ExternalEngine | None:
    """Return the engine whose program or Python module is the first that the command names. Names that are parts of a
    word do not count, because they may be those of hosts, models and options.
    """
    for word in text.split():
        name = word.rpartition("/")[2]
        for engine in external_engines.ENGINES:
            if any(name == program or name.startswith(f"{program}.") for program in engine.program_names):
                return engine
    return None


def _command_line(container: Mapping[str, Any]) -> str:
    words = [*_texts(container.get("command")), *_texts(container.get("args"))]
    return " ".join(word for word in words if isinstance(word, str))


def _texts(value: object) -> list[object]:
    return value if isinstance(value, list) else []
