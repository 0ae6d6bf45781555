"""Places that know several engines: a Prometheus server, a Kubernetes cluster. Lists the engines of one."""

from __future__ import annotations

from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, urlsplit

from kvscope_telemetry.addresses import Address, pod_address, prometheus_address
from kvscope_telemetry.discovery.found_engine import FoundEngine
from kvscope_telemetry.errors import BadInput

PLACES: Final = "prometheus://HOST:PORT[?job=JOB] or k8s://NAMESPACE/SELECTOR"


def is_place(text: str) -> bool:
    """Whether the address `text` may stand for several engines."""
    address = Address(text)
    try:
        options = {name for name, _ in parse_qsl(urlsplit(text).query, keep_blank_values=True)}
    except ValueError:
        return False
    return (address.is_prometheus and "instance" not in options) or (address.is_pod and "pod" not in options)


def find_in_place(text: str, *, api_key: str = "", ca_file: Path | None = None) -> tuple[FoundEngine, ...]:
    """Return the engines of the place `text`.

    Raises:
        BadInput: for an invalid address.
        KvscopeError: if the place does not answer; the message says why.
    """
    if Address(text).is_pod:
        return _pods(text)
    if not Address(text).is_prometheus:
        raise BadInput(f"address {text!r} is not accepted: {PLACES}")
    from kvscope_telemetry.collectors.prometheus.prometheus_address import INSTANCE
    from kvscope_telemetry.collectors.prometheus.prometheus_client import PrometheusClient

    address = prometheus_address(Address(text, api_key=api_key, ca_file=ca_file, tls=ca_file is not None))
    engines = PrometheusClient(address).find_engines(past_s=address.past_s or 0)
    return tuple(
        FoundEngine(str(address.of_engine(labels)), engine.name, note=f"{labels['job']} {labels[INSTANCE]}".strip())
        for engine, labels in engines
    )


def _pods(text: str) -> tuple[FoundEngine, ...]:
    from kvscope_telemetry.collectors.kubernetes.kubectl import find_pods

    pods = find_pods(pod_address(Address(text)))
    return tuple(
        FoundEngine(
            str(pod.address), pod.engine.name, note=" ".join(filter(None, (pod.address.pod, _phase_note(pod.phase))))
        )
        for pod in pods
    )


def _phase_note(phase: str) -> str:
    return "" if phase == "Running" else f"({phase.lower() or 'unknown state'})"
