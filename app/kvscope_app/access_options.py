"""Command-line options for access to watched engines: key file, KV events endpoint, API key, TLS. Imports no Qt."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from kvscope_telemetry.addresses import API_KEY_VARIABLE, Address, each_rank, read_api_key, saved_key
from kvscope_telemetry.collectors.external_engines import each_engine
from kvscope_telemetry.credentials.api_keys import read_api_keys
from kvscope_telemetry.discovery.places import find_in_place, is_place
from kvscope_telemetry.errors import BadInput

MAX_PODS: Final = 8
"""Maximum number of pods that one address may open."""


def parse_addresses(args: argparse.Namespace, texts: Sequence[str], option: str) -> tuple[Address, ...]:
    """Return the addresses in `texts`, the values of `option`, with the access options in `args` applied to each.

    Raises BadInput for an invalid address, or for an access option that does not apply to the addresses.
    """
    used_options = [name for name, value in _access_options(args) if value]
    if used_options and not texts:
        raise BadInput(f"{used_options[0]} applies to attached engines: use it with {option} ADDRESS")
    if args.kv_events and len(texts) > 1:
        raise BadInput(
            f"--kv-events {args.kv_events} works with one {option}; with several, put it into each "
            "address: vllm://HOST:PORT/?kv_events=tcp://HOST:PORT"
        )
    texts = [each for text in texts for pod in _pods_of(text) for each in each_rank(pod)]
    api_key = read_api_key(args.api_key_file) if texts else ""
    addresses = tuple(_with_access(Address(text), args, api_key) for text in texts)
    _check_applicable(args, addresses)
    for address in addresses:
        address.check()
    return addresses


def _pods_of(text: str) -> list[str]:
    """Return the addresses of the pods that a k8s:// address selects; other addresses are returned unchanged.

    Raises BadInput if there are none, or too many to open all.
    """
    if not (Address(text).is_pod and is_place(text)):
        return [text]
    addresses = [found.address for found in find_in_place(text)]
    if not addresses:
        raise BadInput(f"address {text!r} is not accepted: no pod with an engine is selected")
    if len(addresses) > MAX_PODS:
        raise BadInput(
            f"address {text!r} is not accepted: it selects {len(addresses)} pods, at most {MAX_PODS} are opened; use "
            "`kvscope fleet`, or ?pod=NAME"
        )
    return addresses


def add_access_options(parser: argparse.ArgumentParser, option: str) -> None:
    """Add the options for access to the engines that are given by `option`, such as `--attach`."""
    servers, publishers = each_engine("{name}"), each_engine("{name}", with_events=True)
    parser.add_argument(
        "--key",
        metavar="FILE",
        type=Path,
        help=f"with {option}: key file that `kvscope-engine keys new` wrote on the engine's machine, or the word "
        "none (default: the one remembered for the endpoint in "
        "~/.config/kvscope/connections.toml; your own engine on this machine needs none)",
    )
    parser.add_argument(
        "--kv-events",
        metavar="ENDPOINT",
        default="",
        help=f"where {publishers} publishes its KV events, tcp://HOST:PORT (default: what the server reports)",
    )
    parser.add_argument(
        "--api-key-file",
        metavar="FILE",
        type=Path,
        help=f"file with the API key of a {servers} server (default: ${API_KEY_VARIABLE}; none if not set)",
    )
    parser.add_argument(
        "--api-key-over-http",
        action="store_true",
        help=f"allow sending the API key without TLS to a {servers} server on another machine",
    )
    parser.add_argument("--tls", action="store_true", help=f"connect to the {servers} server by https")
    parser.add_argument(
        "--tls-ca", metavar="FILE.pem", type=Path, help="with --tls: file with the certificate authority's certificates"
    )


_OPTIONS_FOR_ALL_ENGINES: Final = ("--tls-ca",)
"""Access options that apply to every address: of a kvscope engine, or of an HTTP server such as vLLM's."""


def _access_options(args: argparse.Namespace) -> tuple[tuple[str, object], ...]:
    names = ("key", "kv_events", "api_key_file", "api_key_over_http", "tls", "tls_ca")
    return tuple((f"--{name.replace('_', '-')}", getattr(args, name)) for name in names)


def _with_access(address: Address, args: argparse.Namespace, api_key: str) -> Address:
    address = replace(address, ca_file=args.tls_ca)
    if not address.is_external:
        return replace(address, key=args.key)
    return replace(
        address,
        kv_events=args.kv_events,
        api_key=api_key or saved_key(read_api_keys(), address.text),
        tls=args.tls or args.tls_ca is not None,
        api_key_over_http=args.api_key_over_http,
    )


def _check_applicable(args: argparse.Namespace, addresses: Sequence[Address]) -> None:
    for name, value in _access_options(args):
        if name in _OPTIONS_FOR_ALL_ENGINES:
            continue
        is_for_external = name != "--key"
        if value and not any(address.is_external == is_for_external for address in addresses):
            kind = (
                each_engine("{scheme}://", "and") if is_for_external else "kvscope engines, ipc://, tcp:// and ssh://"
            )
            raise BadInput(f"{name} is for {kind}, and does not go with {addresses[0].text}")
