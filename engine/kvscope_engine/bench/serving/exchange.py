"""One request on its way to the server and back, timed as it comes. Never raises: what goes wrong is its error.

A connection a request, whose opening is part of its time, as it is for a client that comes for the first time.
"""

from __future__ import annotations

import asyncio
import http.client
import time
from collections.abc import AsyncIterator
from typing import Final

import h11

from kvscope_engine.bench.serving.samples import Sample
from kvscope_engine.bench.serving.target import Target
from kvscope_engine.bench.serving.timeline import Timeline
from kvscope_telemetry.errors import ProtocolError
from kvscope_telemetry.foreign.http.reasons import REFUSALS, why_broken, why_late, why_no_stream
from kvscope_telemetry.foreign.http_get import NoAnswer
from kvscope_telemetry.foreign.prompting.error_words import error_words
from kvscope_telemetry.foreign.prompting.event_lines import EventLines
from kvscope_telemetry.foreign.prompting.telling import DONE, Telling, ToldError

_PIECE_BYTES: Final = 1 << 16
_MAX_ERROR_BYTES: Final = 64 << 10
_EVENTS: Final = "text/event-stream"


async def ask(target: Target, sample: Sample, timeout_s: float) -> Timeline:
    """Send it now; the timeline of its answer."""
    timeline = Timeline(time.perf_counter(), sample.num_prompt_tokens)
    try:
        async with asyncio.timeout(timeout_s):
            await _exchange(target, sample, timeline)
    except NoAnswer as error:
        timeline.error = str(error)
    except ToldError as error:
        timeline.error = f"{target.url} ended its answer: {error}"
    except ProtocolError as error:
        timeline.error = f"{target.url}: {error}"
    except TimeoutError:
        timeline.error = why_late(target.url, timeout_s)
    except (OSError, http.client.HTTPException) as error:
        timeline.error = why_broken(target.url, error)
    return timeline


async def _exchange(target: Target, sample: Sample, timeline: Timeline) -> None:
    address = target.address
    name = address.host if target.tls else None
    reader, writer = await asyncio.open_connection(target.peer, address.port, ssl=target.tls, server_hostname=name)
    try:
        wire = h11.Connection(h11.CLIENT)
        body = target.body(sample)
        parts = (target.head(len(body)), h11.Data(data=body), h11.EndOfMessage())
        writer.write(b"".join(wire.send(part) or b"" for part in parts))
        await _read(target, _events(wire, reader), timeline)
    finally:
        writer.transport.abort()


async def _events(wire: h11.Connection, reader: asyncio.StreamReader) -> AsyncIterator[h11.Response | bytes]:
    """The head of the answer, then what it holds. Raises as `http.client` does."""
    is_over = False
    while True:
        try:
            event = wire.next_event()
        except h11.RemoteProtocolError as error:
            broken = http.client.IncompleteRead(b"") if is_over else http.client.HTTPException(str(error))
            raise broken from None
        if event is h11.NEED_DATA:
            data = await reader.read(_PIECE_BYTES)
            is_over = not data
            wire.receive_data(data)
        elif isinstance(event, h11.Response):
            yield event
        elif isinstance(event, h11.Data):
            yield bytes(event.data)
        elif not isinstance(event, h11.InformationalResponse):
            return


async def _read(target: Target, events: AsyncIterator[h11.Response | bytes], timeline: Timeline) -> None:
    """Until the server says that it is done, or hangs up."""
    lines, telling = EventLines(), Telling("", 1)
    async for piece in events:
        if isinstance(piece, h11.Response):
            await _check(target, piece, events)
            continue
        now_s = time.perf_counter()
        for event in lines.feed(piece):
            if event != DONE:
                _take(telling, event, now_s, timeline)
    if not telling.is_whole:
        raise http.client.IncompleteRead(b"")
    usage = telling.ends()[0].usage
    is_told = usage.prompt_tokens > 0
    timeline.num_output_tokens = usage.completion_tokens if is_told else 0
    timeline.told_prompt_tokens = usage.prompt_tokens


def _take(telling: Telling, event: bytes, now_s: float, timeline: Timeline) -> None:
    was_whole = telling.is_whole
    for tokens in telling.take(event):
        timeline.times_s.append(now_s)
        timeline.pieces.append(tokens.text)
    if telling.is_whole and not was_whole:
        timeline.end_s = now_s


async def _check(target: Target, head: h11.Response, events: AsyncIterator[h11.Response | bytes]) -> None:
    """Raise NoAnswer unless a stream of events begins."""
    told = dict(head.headers)
    kind = told.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")
    status = head.status_code
    if status == http.client.OK and kind == _EVENTS:
        return
    data = b""
    if status not in (http.client.OK, *REFUSALS):
        async for piece in events:
            data += piece if isinstance(piece, bytes) else b""
            if len(data) > _MAX_ERROR_BYTES:
                break
    has_key = bool(target.address.api_key)
    raise NoAnswer(why_no_stream(target.url, status, kind, error_words(data), has_key=has_key), status)
