"""Structs from the values of their fields in their order: with the names written out it takes a tenth of the time that
a mapping of names takes, and a recording has hundreds of them a second."""

from __future__ import annotations

from kvscope_telemetry.messages.telemetry import Event, EventData, RequestInfo


def make_request_info(  # one parameter a field
    number: int,
    request_id: str,
    arrival_ns: int,
    num_prompt_tokens: int,
    max_tokens: int,
    priority: int,
    index: int,
) -> RequestInfo:
    """A request that came."""
    return RequestInfo(
        number=number,
        request_id=request_id,
        arrival_ns=arrival_ns,
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=max_tokens,
        priority=priority,
        index=index,
    )


def make_event(
    kind: str,
    time_ns: int,
    number: int,
    other: int,
    cause: str,
    num_blocks: int,
    num_tokens: int,
    data: EventData | None,
) -> Event:
    """Something that happened."""
    return Event(
        kind=kind,
        time_ns=time_ns,
        number=number,
        other=other,
        cause=cause,
        num_blocks=num_blocks,
        num_tokens=num_tokens,
        data=data,
    )
