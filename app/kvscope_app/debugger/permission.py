"""Reasons why the engine cannot do what a user requests, as texts for disabled actions. Imports no widgets.

Each function returns "" if the action is possible.
"""

from __future__ import annotations

from typing import Final

from kvscope_app.debugger.pin_limits import why_pins_refused
from kvscope_app.session.session import Session
from kvscope_app.views.capability_messages import why_no_commands
from kvscope_telemetry.ledger import STATE_TIERS, BlockState
from kvscope_telemetry.messages.capabilities import OWN_ENGINE
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.mirror.mirror import Mirror
from kvscope_telemetry.source import SourceState

FOR_OPERATORS: Final = "Operators only: you are a viewer at this engine"
_WATCH_ONLY: Final = "This engine can be watched but not controlled"
_NOT_PAUSED: Final = "The engine is not paused"
_PAUSE_FIRST: Final = "The engine is not paused: pause it first (F9)"
_WAITING: Final = (RequestState.WAITING, RequestState.PREEMPTED)


def why_not_control(session: Session) -> str:
    if session.timeline.is_file:
        return "This is a recording: there is no engine to control"
    if not session.accepts_commands:
        return why_no_commands(session.live_mirror.capabilities) or _WATCH_ONLY
    return FOR_OPERATORS if session.is_viewer else ""


def why_not_resume(session: Session, *, is_paused_by_us: bool) -> str:
    """Return why the engine cannot be resumed.

    `is_paused_by_us` says whether this window requested a pause. The session knows of the pause only once the engine's
    next status has arrived.
    """
    is_paused = is_paused_by_us or session.status.state is SourceState.PAUSED
    return why_not_control(session) or ("" if is_paused else _NOT_PAUSED)


def why_not_unpin_all(session: Session) -> str:
    return why_not_intervene(session) or ("" if session.live_mirror.pinned else "No block is pinned")


def why_not_intervene(session: Session) -> str:
    """Return why the engine accepts no interventions: stepping, preemption, pins, evictions, and changed limits."""
    reason = why_not_control(session)
    if reason or session.status.intervenes:
        return reason
    return "The engine has not reported support for this"


def why_not_adapters(session: Session) -> str:
    """Return why the dialog of LoRA adapters is disabled, for example because none is loaded and none can be loaded."""
    if session.timeline.is_file:
        return "This is a recording: there is no engine to control"
    has_any = session.status.adapters or session.status.takes_adapters
    return "" if has_any else why_not_load(session)


def why_not_load(session: Session) -> str:
    reason = why_not_control(session)
    if reason or session.status.takes_adapters:
        return reason
    if session.mirror.capabilities.engine != OWN_ENGINE.engine:
        return "Use the engine's own API to load and unload adapters"
    return "The engine was started without --allow-runtime-lora-updating"


def why_not_step(session: Session) -> str:
    return why_not_intervene(session) or ("" if session.status.state is SourceState.PAUSED else _PAUSE_FIRST)


def why_not_act(session: Session) -> str:
    """Return why no command can be sent now: the engine does not allow it, or the window shows the past."""
    past_reason = "You are viewing the past: go live (End) to control the engine" if session.timeline.is_paused else ""
    return why_not_intervene(session) or past_reason


def why_not_preempt(mirror: Mirror, number: int | None) -> str:
    if number is None:
        return "No request is selected"
    state = _state_of(mirror, number)
    if state is RequestState.RUNNING:
        return ""
    if state in _WAITING:
        return f"Request {number} is waiting: it has no blocks to free"
    return f"Request {number} has ended"


def why_not_swap(mirror: Mirror, number: int | None) -> str:
    reason = why_not_preempt(mirror, number)
    if reason:
        return reason
    if not _is_own(mirror):
        return f"{mirror.capabilities.engine} recomputes preempted requests: it cannot swap"
    has_tier = mirror.hello is not None and mirror.hello.cache.num_host_blocks > 0
    return "" if has_tier else "This engine has no lower tier to swap to"


def why_not_limit(session: Session) -> str:
    return why_not_intervene(session) or _why_foreign(session.live_mirror, "limits of a batch cannot be changed")


def why_not_abort(mirror: Mirror, number: int | None) -> str:
    """Return why a request cannot be aborted. Only running and waiting requests can be."""
    is_waiting = number is not None and _state_of(mirror, number) in _WAITING
    return "" if is_waiting else why_not_preempt(mirror, number)


def _state_of(mirror: Mirror, number: int) -> RequestState | None:
    row = mirror.requests.row_of(number)
    return None if row is None else RequestState(int(mirror.requests.state[row]))


def why_not_pin(mirror: Mirror, block: int, *, with_prefix: bool = False) -> str:
    reason = why_no_pins(mirror) or _why_no_block(mirror, block)
    if not reason and not mirror.ledger.hash[block]:
        return f"Block {block} is not in the prefix cache: only full, cached blocks can be pinned"
    return reason or why_pins_refused(mirror, (block,), with_prefix=with_prefix)


def why_no_pins(mirror: Mirror) -> str:
    return _why_foreign(mirror, "blocks cannot be pinned")


def why_not_unpin(mirror: Mirror, block: int) -> str:
    return _why_no_block(mirror, block) or ("" if block in mirror.pinned else f"Block {block} is not pinned")


def why_not_evict(mirror: Mirror, block: int) -> str:
    reason = _why_no_block(mirror, block)
    if reason:
        return reason
    if block in mirror.pinned:
        return f"Block {block} is pinned: unpin it first"
    if mirror.ledger.state[block] == BlockState.CACHED:
        return ""
    in_use = mirror.ledger.state[block] == BlockState.ACTIVE
    return f"Block {block} is in use" if in_use else f"Block {block} is not cached: there is nothing to evict"


def _is_own(mirror: Mirror) -> bool:
    return mirror.capabilities.engine == OWN_ENGINE.engine


def _why_foreign(mirror: Mirror, capability: str) -> str:
    """Return a reason such as "In vllm, blocks cannot be pinned" for an engine other than kvscope's own,
    otherwise "".
    """
    return "" if _is_own(mirror) else f"In {mirror.capabilities.engine}, {capability}"


def _why_no_block(mirror: Mirror, block: int) -> str:
    if not 0 <= block < mirror.num_rows:
        return "No block is selected: click one on the page map"
    if mirror.ledger.tier[block] in STATE_TIERS:
        return "Recurrent states cannot be pinned or evicted"
    return (
        ""
        if block < mirror.num_blocks
        else "This block is in a lower tier: only blocks of the pool can be pinned or evicted"
    )
