"""Messages with the fields for roles, pauses and sessions: their bytes and bounds."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.messages import wire
from kvscope_telemetry.messages.commands import (
    MAX_AWAITED,
    Abort,
    Awaited,
    Control,
    Failed,
    GetStatus,
    Status,
    Tokens,
)
from kvscope_telemetry.messages.telemetry import Heartbeat

GOLDEN: dict[str, tuple[Any, Any, str]] = {
    "GetStatus": (
        GetStatus(tag=2, session="5e" * 16, awaited=(Awaited(request_id="r", heard=(3, -1)), Awaited(request_id="s"))),
        wire.decode_command,
        "84a474797065a9476574537461747573a374616702a773657373696f6ed920356535653565356535"
        "6535653565"
        "356535653565356535653565356535653565a7617761697465649282aa726571756573745f6964a1"
        "72a5686561"
        "72649203ff81aa726571756573745f6964a173",
    ),
    "Abort": (
        Abort(request_id="r", anyones=True),
        wire.decode_command,
        "83a474797065a541626f7274aa726571756573745f6964a172a7616e796f6e6573c3",
    ),
    "Control": (
        Control(action="pause", tag=4, lease_s=5.0),
        wire.decode_command,
        "84a474797065a7436f6e74726f6ca6616374696f6ea57061757365a374616704a76c656173655f73cb4014000000000000",
    ),
    "Tokens": (
        Tokens(request_id="r", token_ids=(1,), text="a", num_missed=3),
        wire.decode_reply,
        "85a474797065a6546f6b656e73aa726571756573745f6964a172a9746f6b656e5f6964739101a474"
        "657874a161"
        "aa6e756d5f6d697373656403",
    ),
    "Failed": (
        Failed(reason="why", request_id="r"),
        wire.decode_reply,
        "83a474797065a64661696c6564a6726561736f6ea3776879aa726571756573745f6964a172",
    ),
    "Status": (
        Status(phase="ready", telemetry_endpoint="e", paused=True, paused_by="alice", role="viewer", name="bob"),
        wire.decode_reply,
        "de0007a474797065a6537461747573a57068617365a57265616479b274656c656d657472795f656e6470"
        "6f696e74a1"
        "65a6706175736564c3a97061757365645f6279a5616c696365a4726f6c65a6766965776572a46e61"
        "6d65a3626f"
        "62",
    ),
    "Heartbeat": (
        Heartbeat(epoch=77, time_ns=3, seq=3, step=11, paused_by="alice"),
        wire.decode_telemetry,
        "86a474797065a9486561727462656174a565706f63684da774696d655f6e7303a373657103a47374"
        "65700ba970"
        "61757365645f6279a5616c696365",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_messages_with_role_fields_encode_to_the_stored_bytes(name: str) -> None:
    message, decode, golden = GOLDEN[name]
    assert decode(bytes.fromhex(golden)) == message
    assert wire.encode(message).hex() == golden


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "GetStatus", "session": "x" * 65},
        {"type": "GetStatus", "awaited": [{"request_id": "r"}] * (MAX_AWAITED + 1)},
        {"type": "GetStatus", "awaited": [{"request_id": "r", "heard": [0] * 1025}]},
        {"type": "Control", "action": "pause", "lease_s": -1.0},
        {"type": "Control", "action": "pause", "lease_s": 1e9},
        {"type": "Control", "action": "pause", "lease_s": float("nan")},
    ],
)
def test_command_fields_out_of_bounds_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        wire.decode_command(msgspec.msgpack.encode(fields))
