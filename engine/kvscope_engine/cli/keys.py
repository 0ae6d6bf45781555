"""Command `kvscope-engine keys`: creates, lists and removes the key files with which clients authenticate over TCP."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvscope_engine.command_parser import CommandParser
from kvscope_telemetry.credentials.key_ring import ClientEntry, KeyRing, default_keys_folder, read_allow_list
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.roles import Role

ABOUT = (
    "Clients on tcp authenticate with a key file. Make one here, copy it to the client's machine, and pass "
    "it to the desktop with --key FILE. A running engine notices new and removed keys within half a "
    "second. Viewers see the cache; operators also send prompts, control the engine and read block text."
)


def add_parser(commands: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "keys", help="manage keys and roles of clients on tcp", description=ABOUT
    )
    parser.set_defaults(run=_no_action)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", parser_class=CommandParser)
    new = _action(actions, "new", _new, "create a key for a client and allow it")
    new.add_argument("name", metavar="NAME", help="name of the client")
    new.add_argument(
        "--role", choices=[str(role) for role in Role], default=str(Role.VIEWER), help="role of the client"
    )
    new.add_argument("--out", type=Path, metavar="FILE", help="the key file to write (default: NAME.key)")
    _action(actions, "list", _list, "list allowed keys and their roles")
    remove = _action(actions, "remove", _remove, "remove a key; clients connected with it are disconnected")
    remove.add_argument("name", metavar="NAME", help="name of the client")
    _action(actions, "server", _server, "show the engine's public key")
    return parser


def create_key(ring: KeyRing, name: str, role: Role, out: Path | None) -> dict[str, str]:
    path = out or Path(f"{name}.key")
    key = ring.new(name, role, path)
    return {"name": key.name, "role": str(key.role), "public": key.public, "file": str(path)}


def _action(
    actions: argparse._SubParsersAction[Any], name: str, run: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    parser.add_argument(
        "--keys", type=Path, metavar="DIR", help=f"folder of the engine's keys (default: {default_keys_folder()})"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.set_defaults(run=run)
    return parser


def _no_action(args: argparse.Namespace) -> int:
    raise BadInput("no action given: use one of new, list, remove, server (see `kvscope-engine keys --help`)")


def _new(args: argparse.Namespace) -> int:
    key = create_key(KeyRing(args.keys), args.name, Role(args.role), args.out)
    _print(args, key, f"{key['file']}: {key['name']} is {key['role']}; copy it to the client and keep it private")
    return 0


def _list(args: argparse.Namespace) -> int:
    entries = read_allow_list(args.keys or default_keys_folder())
    rows = [{"name": e.name, "role": str(e.role), "made": e.made, "public": e.public} for e in entries]
    _print(args, rows, "\n".join(_rows(entries)))
    return 0


def _remove(args: argparse.Namespace) -> int:
    removed = KeyRing(args.keys).remove(args.name)
    _print(args, {"name": removed.name, "public": removed.public}, f"{removed.name} removed")
    return 0


def _server(args: argparse.Namespace) -> int:
    ring = KeyRing(args.keys)
    _print(args, {"public": ring.engine.public, "keys": str(ring.folder)}, ring.engine.public)
    return 0


def _print(args: argparse.Namespace, value: object, text: str) -> None:
    print(json.dumps(value) if args.json else text)


def _rows(entries: list[ClientEntry]) -> list[str]:
    table = [("name", "role", "made", "public key"), *((e.name, e.role, e.made, e.public) for e in entries)]
    widths = [max(len(row[column]) for row in table) for column in range(3)]
    return ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in table]
