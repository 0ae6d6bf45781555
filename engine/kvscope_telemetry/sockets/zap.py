"""ZAP (rfc.zeromq.org/spec/27): libzmq asks who a connection is before it lets it in, and this answers.

Only the frames of question and answer; knows no sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from zmq.utils import z85

from kvscope_telemetry.messages.roles import Caller

ADDRESS: Final = "inproc://zeromq.zap.01"
DOMAIN: Final = b"kvscope"
_VERSION: Final = b"1.0"


def answer(question: Sequence[bytes], caller: Callable[[str], Caller | None]) -> list[bytes]:
    """The answer to a question of libzmq's. The User-Id of those let in is their public key in Z85.

    A refusal is final for the connection and says no reason: the other side learns that it was refused.
    """
    request_id = question[1] if len(question) > 1 else b""
    if len(question) != 7 or question[0] != _VERSION or question[5] != b"CURVE" or len(question[6]) != 32:
        return [_VERSION, request_id, b"400", b"a CURVE key is needed", b"", b""]
    public = z85.encode(question[6]).decode("ascii")
    if caller(public) is None:
        return [_VERSION, request_id, b"400", b"this key is not known here", b"", b""]
    return [_VERSION, request_id, b"200", b"OK", public.encode("ascii"), b""]
