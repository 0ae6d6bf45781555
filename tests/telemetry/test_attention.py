"""Attention measured per block: on the wire, in recordings, and where nothing was measured."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.ledger import (
    MEASURED,
    BlockRows,
    Ledger,
    attention_share,
    attention_shares,
    attention_units,
    unpack,
)
from kvscope_telemetry.messages import wire
from kvscope_telemetry.messages.telemetry import Frame
from kvscope_telemetry.mirror.coalesce import coalesce
from kvscope_telemetry.recordings.columns import Columns, pack

GOLDEN_FRAME = (
    "86a474797065a54672616d65a565706f636801a373657103a47374657004a774696d655f6e7305a6626c6f636b738ba3696473c404010000"
    "00a57374617465c40101a97265665f636f756e74c40400000000a666696c6c6564c4020400a56f776e6572c40407000000a474696572c401"
    "00ae6c6173745f757365645f73746570c40404000000ab7072656669785f68697473c4020000a468617368c4080000000000000000a9617474656e74696f6e"
    "c4040165cd1dae617474656e74696f6e5f73746570c40403000000"
)


def ledger_of_three() -> Ledger:
    ledger = Ledger(3)
    ledger.state[1], ledger.filled[1], ledger.owner[1], ledger.last_used_step[1] = 1, 4, 7, 4
    ledger.attention[1] = attention_units(np.array([0.5], np.float32))[0]
    ledger.attention_step[1] = 3
    return ledger


def frame_of(blocks: BlockRows, seq: int = 3) -> Frame:
    return Frame(epoch=1, seq=seq, step=4, time_ns=5, blocks=blocks)


def rows_of(ledger: Ledger, *ids: int) -> BlockRows:
    return ledger.pack(np.array(ids, np.uint32))


def test_frame_with_attention_encodes_to_the_stored_bytes() -> None:
    frame = frame_of(rows_of(ledger_of_three(), 1))
    assert wire.encode(frame).hex() == "de0006" + GOLDEN_FRAME[2:]  # the map of a frame is written with a 16-bit length
    assert wire.decode_telemetry(bytes.fromhex(GOLDEN_FRAME)) == frame


def test_unmeasured_attention_takes_no_bytes() -> None:
    ledger = ledger_of_three()
    assert all(getattr(rows_of(ledger, 0, 2), name) == b"" for name in MEASURED)
    assert len(ledger.pack_all().attention) == 12


def test_frames_with_and_without_attention_are_merged() -> None:
    ledger = ledger_of_three()
    measured, untold = rows_of(ledger, 0, 1), rows_of(ledger, 2)
    assert unpack([measured, untold, measured])["attention_step"].tolist() == [0, 3, 0, 0, 3]
    columns = coalesce([frame_of(untold), frame_of(measured)]).block_columns
    assert columns["attention"].tolist() == [0, 0, 500_000_001]
    assert unpack([untold])["attention"].tolist() == [0]


@pytest.mark.parametrize("name", MEASURED)
@pytest.mark.parametrize("size", [1, 4, 11, 16])
def test_attention_column_of_wrong_length_is_refused(name: str, size: int) -> None:
    rows = msgspec.structs.replace(rows_of(ledger_of_three(), 0, 1, 2), **{name: b"\1" * size})
    with pytest.raises(ProtocolError, match=f"bytes of {name} where 3 rows are 12"):
        wire.decode_telemetry(wire.encode(frame_of(rows)))


def test_attention_round_trips_through_columns() -> None:
    ledger = ledger_of_three()
    frames = [frame_of(rows_of(ledger, *ids), seq) for seq, ids in enumerate([(0, 1), (2,), (1,), ()], start=1)]
    assert Columns(pack(frames)).records(Frame) == frames
    ledger.attention[:], ledger.attention_step[:] = 0, 0
    frames = [frame_of(rows_of(ledger, 0, 1), seq) for seq in range(1, 4)]
    assert Columns(pack(frames)).records(Frame) == frames


def test_attention_shares_round_trip() -> None:
    shares = np.array([0.0, 1e-9, 0.03, 1.0, 1.0001], np.float32)
    assert attention_shares(attention_units(shares)) == pytest.approx(shares.clip(max=1.0), abs=1e-8)
    assert attention_share(0) is None
    assert attention_share(1) == 0.0
    assert attention_share(1_000_000_001) == 1.0
