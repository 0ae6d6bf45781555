"""Handles values of later versions that this version does not have.

An event of an unknown kind is removed from its frame, an unknown state or tier becomes `UNKNOWN`, and any other unknown
string is left for views to show unchanged. All of these are counted. Messages with only known values are returned
unchanged, without a copy. Must not depend on sockets. `validity` handles invalid messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, get_args

from msgspec.structs import replace

from kvscope_telemetry.ledger import BlockRows, BlockState, Tier
from kvscope_telemetry.messages.commands import Finished, FinishReason, Phase, Reply, Status
from kvscope_telemetry.messages.event_kinds import BY_NAME
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import Frame, RequestRows, Snapshot, TelemetryMessage

FINISH_REASONS: Final = frozenset[str](get_args(FinishReason))
PHASES: Final = frozenset[str](get_args(Phase))


@dataclass(slots=True)
class Unknowns:
    """Counts of skipped or replaced values. Not thread-safe."""

    messages: int = 0
    """Number of skipped messages of unknown kinds."""
    events: int = 0
    """Number of events of unknown kinds, which were removed from their frames."""
    values: int = 0
    """Number of occurrences of unknown states, tiers and strings."""

    @property
    def num_skipped(self) -> int:
        return self.messages + self.events


class _EnumColumn:
    """Finds and replaces unknown values in packed u1 columns of an enum."""

    def __init__(self, enum: type[BlockState] | type[Tier] | type[RequestState]) -> None:
        self._accepted = bytes(enum)
        self._table = bytes(value if value in self._accepted else enum.UNKNOWN for value in range(256))

    def count_unknown(self, column: bytes) -> int:
        return len(column.translate(None, self._accepted))

    def replace_unknown(self, column: bytes) -> bytes:
        return column.translate(self._table)


_BLOCK_STATES: Final = _EnumColumn(BlockState)
_TIERS: Final = _EnumColumn(Tier)
_REQUEST_STATES: Final = _EnumColumn(RequestState)


def known_telemetry(message: TelemetryMessage, unknowns: Unknowns) -> TelemetryMessage:
    """Return `message` without unknown values, which are counted in `unknowns`."""
    if isinstance(message, Frame):
        return _known_frame(message, unknowns)
    return known_snapshot(message, unknowns) if isinstance(message, Snapshot) else message


def known_reply(reply: Reply, unknowns: Unknowns) -> Reply:
    """Return `reply` without unknown values, which are counted. An unknown finish reason or phase is left unchanged."""
    if isinstance(reply, Snapshot):
        return known_snapshot(reply, unknowns)
    if isinstance(reply, Finished):
        unknowns.values += reply.finish_reason not in FINISH_REASONS
    elif isinstance(reply, Status):
        unknowns.values += reply.phase not in PHASES
    return reply


def known_snapshot(snapshot: Snapshot, unknowns: Unknowns) -> Snapshot:
    blocks, requests = _known_blocks(snapshot.blocks, unknowns), _known_requests(snapshot.requests, unknowns)
    if blocks is snapshot.blocks and requests is snapshot.requests:
        return snapshot
    return replace(snapshot, blocks=blocks, requests=requests)


def _known_frame(frame: Frame, unknowns: Unknowns) -> Frame:
    blocks, requests = _known_blocks(frame.blocks, unknowns), _known_requests(frame.requests, unknowns)
    events = frame.events
    if any(event.kind not in BY_NAME for event in events):
        events = tuple(event for event in events if event.kind in BY_NAME)
        unknowns.events += len(frame.events) - len(events)
    if blocks is frame.blocks and requests is frame.requests and events is frame.events:
        return frame
    return replace(frame, blocks=blocks, requests=requests, events=events)


def _known_blocks(rows: BlockRows, unknowns: Unknowns) -> BlockRows:
    states, tiers = _BLOCK_STATES.count_unknown(rows.state), _TIERS.count_unknown(rows.tier)
    if not states and not tiers:
        return rows
    unknowns.values += states + tiers
    return replace(rows, state=_BLOCK_STATES.replace_unknown(rows.state), tier=_TIERS.replace_unknown(rows.tier))


def _known_requests(rows: RequestRows, unknowns: Unknowns) -> RequestRows:
    others = _REQUEST_STATES.count_unknown(rows.state)
    if not others:
        return rows
    unknowns.values += others
    return replace(rows, state=_REQUEST_STATES.replace_unknown(rows.state))
