"""Key files: TOML, for this user alone. Owns their format; knows no sockets and no folder.

A client's file says who the client is and which engine it belongs to, so that one file is all there is to copy:

    [key]
    name = "laptop"
    role = "operator"       # what the engine said when it was made; its allow-list decides
    public = "…"            # CURVE keys in Z85, 40 characters each
    secret = "…"
    engine = "…"            # the engine's public key
"""

from __future__ import annotations

import re
import struct
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from zmq.utils import z85

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.keys.private_files import read_private, write_private
from kvscope_telemetry.messages.roles import Role

MAX_NAME: Final = 64
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]*")


@dataclass(frozen=True, slots=True)
class ClientKey:
    """What a client needs to be let in."""

    name: str
    role: Role
    public: str
    secret: str = field(repr=False)
    engine: str
    """The public key of the engine."""


@dataclass(frozen=True, slots=True)
class EngineKey:
    """What an engine proves itself with."""

    public: str
    secret: str = field(repr=False)


def read_client_key(path: Path) -> ClientKey:
    """Raises BadInput naming the file and what is wrong with it."""
    what = "key file"
    table = _table(path, what)
    public, secret, engine = (checked_key(table.get(name), f"{what} {path}", name) for name in _PARTS)
    return ClientKey(
        name=checked_name(table.get("name")),
        role=checked_role(table.get("role", Role.VIEWER)),
        public=public,
        secret=secret,
        engine=engine,
    )


def write_client_key(path: Path, key: ClientKey) -> None:
    """Raises BadInput when the file is there already, or cannot be written."""
    text = (
        f"# kvscope key: whoever holds this file is {key.name!r} at the engine. Keep it private.\n"
        f'[key]\nname = "{key.name}"\nrole = "{key.role}"\n'
        f'public = "{key.public}"\nsecret = "{key.secret}"\nengine = "{key.engine}"\n'
    )
    write_private(path, text, "key file", replace=False)


def read_engine_key(path: Path) -> EngineKey:
    """Raises BadInput naming the file and what is wrong with it."""
    what = "engine key"
    table = _table(path, what)
    public, secret = (checked_key(table.get(name), f"{what} {path}", name) for name in ("public", "secret"))
    return EngineKey(public, secret)


def write_engine_key(path: Path, key: EngineKey) -> None:
    """Raises BadInput when the file is there already, or cannot be written."""
    text = (
        f'# kvscope: the engine\'s own key. Keep it private.\n[key]\npublic = "{key.public}"\nsecret = "{key.secret}"\n'
    )
    write_private(path, text, "engine key", replace=False)


def checked_name(name: object) -> str:
    """A name that reads well in a file, a table and a sentence; raises BadInput for any other."""
    if not isinstance(name, str) or len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise BadInput(
            f"name {name!r:.80} is not accepted: up to {MAX_NAME} letters, digits and . _ @ -, a letter or digit first"
        )
    return name


def checked_role(role: object) -> Role:
    """Raises BadInput for what is no role."""
    try:
        return Role(str(role))
    except ValueError:
        raise BadInput(f"role {role!r:.80} is not accepted: {' or '.join(Role)}") from None


def checked_key(text: object, where: str, name: str) -> str:
    """A CURVE key in Z85; raises BadInput for what is none. The value is not told: it may be a secret."""
    try:
        if isinstance(text, str) and len(text) == 40 and len(z85.decode(text.encode("ascii"))) == 32:
            return text
    except (KeyError, ValueError, struct.error):
        pass
    raise BadInput(f"{where} is not accepted: its {name} key is not 40 characters of Z85")


_PARTS: Final = ("public", "secret", "engine")


def _table(path: Path, what: str) -> Mapping[str, object]:
    try:
        table = tomllib.loads(read_private(path, what)).get("key")
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{what} {path} is not accepted: it is not TOML: {error}") from None
    if not isinstance(table, dict):
        raise BadInput(f"{what} {path} is not accepted: it has no [key] table")
    return table
