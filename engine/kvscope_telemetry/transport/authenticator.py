"""Identifies clients: the key that each client authenticated with, and its current role.

Owns the bounded list of clients that sent commands recently. The allow-list is checked for each command, so that a
removed key is refused immediately. Uses ZeroMQ only to set socket options.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

from zmq.utils import z85

from kvscope_telemetry.credentials.key_ring import KeyRing
from kvscope_telemetry.messages.roles import Caller, Role
from kvscope_telemetry.operating_system import user_name

MAX_REMEMBERED: Final = 4096
ZAP_ADDRESS: Final = "inproc://zeromq.zap.01"
"""Address at which libzmq asks whether to accept a connection (rfc.zeromq.org/spec/27)."""
ZAP_DOMAIN: Final = b"kvscope"
_ZAP_VERSION: Final = b"1.0"


class Authenticator:
    """Authenticates connections and clients. Modified by the I/O thread; `caller` may be called from any thread."""

    def __init__(self, endpoint: str, keys: KeyRing | None, keyless: Role) -> None:
        is_ipc = endpoint.startswith("ipc")
        self._keys = None if is_ipc else keys
        self._all = Caller(user_name(), Role.OPERATOR) if is_ipc else Caller("keyless", keyless)
        self._keys_of: OrderedDict[bytes, str] = OrderedDict()
        self._let_in: dict[str, None] = {}
        self._has_removed = False

    @property
    def has_keys(self) -> bool:
        """Whether only clients on an allow-list are accepted."""
        return self._keys is not None

    def guard(self, socket: Any) -> None:
        """If an allow-list is used, configure `socket` so that libzmq requests authentication of each connection."""
        if self._keys is not None:
            socket.curve_server = 1
            socket.curve_publickey = self._keys.engine.public.encode("ascii")
            socket.curve_secretkey = self._keys.engine.secret.encode("ascii")
            socket.zap_domain = ZAP_DOMAIN
            socket.zap_enforce_domain = 1  # without a ZAP reply, no connection is accepted

    def answer(self, question: Sequence[bytes]) -> list[bytes]:
        """Return the ZAP reply to the authentication request `question`. The User-Id of accepted clients is their
        public key in Z85.

        A refusal is final for the connection and contains no reason: the peer only learns that it was refused.
        """
        request_id = question[1] if len(question) > 1 else b""
        if len(question) != 7 or question[0] != _ZAP_VERSION or question[5] != b"CURVE" or len(question[6]) != 32:
            return [_ZAP_VERSION, request_id, b"400", b"a CURVE key is needed", b"", b""]
        public = z85.encode(question[6]).decode("ascii")
        if not self._admits(public):
            return [_ZAP_VERSION, request_id, b"400", b"this key is not known here", b"", b""]
        return [_ZAP_VERSION, request_id, b"200", b"OK", public.encode("ascii"), b""]

    def record_key(self, client: bytes, public_key: str) -> None:
        """Record that a command of `client` arrived over a connection authenticated with `public_key`."""
        self._keys_of[client] = public_key
        self._keys_of.move_to_end(client)
        if len(self._keys_of) > MAX_REMEMBERED:
            self._keys_of.popitem(last=False)

    def caller(self, client: bytes) -> Caller | None:
        """Return the client with its current role, or None if the client is unknown or its key was removed."""
        return self._all if self._keys is None else self._keys.caller(self._keys_of.get(client, ""))

    def removed(self) -> list[bytes]:
        """Return the clients whose key is no longer on the allow-list. Each client is returned only once."""
        if self._keys is None:
            return []
        self._keys.refresh()
        gone = {key for key in self._let_in if self._keys.caller(key) is None}
        for key in gone:
            del self._let_in[key]
        self._has_removed = self._has_removed or bool(gone)
        clients = [client for client, key in self._keys_of.items() if key in gone]
        for client in clients:
            del self._keys_of[client]
        return clients

    def must_all_authenticate_again(self) -> bool:
        """Return whether a client was accepted with a key that has been removed since. Returns True once per
        removal.
        """
        is_one_gone, self._has_removed = self._has_removed, False
        return is_one_gone

    def _admits(self, public_key: str) -> bool:
        if self._keys is None:
            return False
        self._keys.refresh()  # new connections are checked against the current list
        if self._keys.caller(public_key) is None:
            return False
        self._let_in[public_key] = None
        return True
