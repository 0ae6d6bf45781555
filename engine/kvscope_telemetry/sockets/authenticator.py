"""Identifies clients: which key each client proved, and what that key may do now.

Owns the list of clients that gave commands lately, bounded. The allow-list is asked anew for each command, so
a key that was removed is refused at once. Knows ZeroMQ by the options of a socket alone.
"""

from __future__ import annotations

import os
import pwd
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

from zmq.utils import z85

from kvscope_telemetry.keys.key_ring import KeyRing
from kvscope_telemetry.messages.roles import Caller, Role

MAX_REMEMBERED: Final = 4096
ZAP_ADDRESS: Final = "inproc://zeromq.zap.01"
"""Where libzmq asks who a connection is before it lets it in (rfc.zeromq.org/spec/27)."""
ZAP_DOMAIN: Final = b"kvscope"
_ZAP_VERSION: Final = b"1.0"


class Authenticator:
    """Written by the I/O thread; `caller` may be asked from any."""

    def __init__(self, endpoint: str, keys: KeyRing | None, keyless: Role) -> None:
        is_ipc = endpoint.startswith("ipc")
        self._keys = None if is_ipc else keys
        self._all = Caller(_user_name(), Role.OPERATOR) if is_ipc else Caller("keyless", keyless)
        self._keys_of: OrderedDict[bytes, str] = OrderedDict()
        self._let_in: dict[str, None] = {}
        self._is_one_gone = False

    @property
    def has_keys(self) -> bool:
        """Whether only those on an allow-list are let in."""
        return self._keys is not None

    def guard(self, socket: Any) -> None:
        """Have libzmq ask `answer` about each connection to `socket`, when there are keys."""
        if self._keys is not None:
            socket.curve_server = 1
            socket.curve_publickey = self._keys.engine.public.encode("ascii")
            socket.curve_secretkey = self._keys.engine.secret.encode("ascii")
            socket.zap_domain = ZAP_DOMAIN
            socket.zap_enforce_domain = 1  # without an answer nobody is let in

    def answer(self, question: Sequence[bytes]) -> list[bytes]:
        """What to tell libzmq about a connection. The User-Id of those let in is their public key in Z85.

        A refusal is final for the connection and says no reason: the other side learns that it was refused.
        """
        request_id = question[1] if len(question) > 1 else b""
        if len(question) != 7 or question[0] != _ZAP_VERSION or question[5] != b"CURVE" or len(question[6]) != 32:
            return [_ZAP_VERSION, request_id, b"400", b"a CURVE key is needed", b"", b""]
        public = z85.encode(question[6]).decode("ascii")
        if not self._admits(public):
            return [_ZAP_VERSION, request_id, b"400", b"this key is not known here", b"", b""]
        return [_ZAP_VERSION, request_id, b"200", b"OK", public.encode("ascii"), b""]

    def note(self, client: bytes, public_key: str) -> None:
        """A command of `client` came over a connection that proved this key."""
        self._keys_of[client] = public_key
        self._keys_of.move_to_end(client)
        if len(self._keys_of) > MAX_REMEMBERED:
            self._keys_of.popitem(last=False)

    def caller(self, client: bytes) -> Caller | None:
        """Who that is, with the role it has now; None for a key that is not known (any more)."""
        return self._all if self._keys is None else self._keys.caller(self._keys_of.get(client, ""))

    def removed(self) -> list[bytes]:
        """Clients whose key is not on the list any more; each is told once."""
        if self._keys is None:
            return []
        self._keys.refresh()
        gone = {key for key in self._let_in if self._keys.caller(key) is None}
        for key in gone:
            del self._let_in[key]
        self._is_one_gone = self._is_one_gone or bool(gone)
        clients = [client for client, key in self._keys_of.items() if key in gone]
        for client in clients:
            del self._keys_of[client]
        return clients

    def must_all_authenticate_again(self) -> bool:
        """Whether somebody was let in who would not be now; says so once."""
        is_one_gone, self._is_one_gone = self._is_one_gone, False
        return is_one_gone

    def _admits(self, public_key: str) -> bool:
        if self._keys is None:
            return False
        self._keys.refresh()  # nobody gets in by a list of a moment ago
        if self._keys.caller(public_key) is None:
            return False
        self._let_in[public_key] = None
        return True


def _user_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return f"user {os.geteuid()}"
