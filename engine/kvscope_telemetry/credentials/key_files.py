"""Key files in TOML, readable by this user only. Owns their format; must not depend on sockets or on a directory.

A client's file contains the client's name and the public key of its engine, so that only this file has to be copied:

    [key]
    name = "laptop"
    role = "operator"       # as of creation; the engine's allow-list decides
    public = "..."          # CURVE keys in Z85, 40 characters each
    secret = "..."
    engine = "..."          # the engine's public key
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

from kvscope_telemetry.credentials.private_files import read_private, write_private
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.roles import Role

MAX_NAME: Final = 64
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]*")


@dataclass(frozen=True, slots=True)
class ClientKey:
    name: str
    role: Role
    public: str
    secret: str = field(repr=False)
    engine: str
    """Public key of the engine to which the client connects."""


@dataclass(frozen=True, slots=True)
class EngineKey:
    public: str
    secret: str = field(repr=False)


def read_client_key(path: Path) -> ClientKey:
    """Read a client's key file. Raises BadInput with the file's path and the error."""
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
    text = (
        f"# kvscope key: whoever holds this file is {key.name!r} at the engine. Keep it private.\n"
        f'[key]\nname = "{key.name}"\nrole = "{key.role}"\n'
        f'public = "{key.public}"\nsecret = "{key.secret}"\nengine = "{key.engine}"\n'
    )
    write_private(path, text, "key file", replace=False)


def read_engine_key(path: Path) -> EngineKey:
    """Read the engine's key file. Raises BadInput with the file's path and the error."""
    what = "engine key"
    table = _table(path, what)
    public, secret = (checked_key(table.get(name), f"{what} {path}", name) for name in ("public", "secret"))
    return EngineKey(public, secret)


def write_engine_key(path: Path, key: EngineKey) -> None:
    """Write the engine's key file. Raises BadInput if the file exists or cannot be written."""
    text = (
        f'# kvscope: the engine\'s own key. Keep it private.\n[key]\npublic = "{key.public}"\nsecret = "{key.secret}"\n'
    )
    write_private(path, text, "engine key", replace=False)


def checked_name(name: object) -> str:
    """Return `name`. Raises BadInput if it has characters that are not allowed in names of keys, or is too long."""
    if not isinstance(name, str) or len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise BadInput(
            f"name {name!r:.80} is not accepted: up to {MAX_NAME} letters, digits and . _ @ -, a letter or digit first"
        )
    return name


def checked_role(role: object) -> Role:
    try:
        return Role(str(role))
    except ValueError:
        raise BadInput(f"role {role!r:.80} is not accepted: {' or '.join(Role)}") from None


def checked_key(text: object, where: str, name: str) -> str:
    """Return `text` if it is a valid CURVE key in Z85. Otherwise raises BadInput without the value, which may
    be a secret.
    """
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
