"""All requests of a run, each sent when it is due, on one loop. Owns the client's clock and what it took of a core."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvscope_engine.bench.serving.codec import Codec
from kvscope_engine.bench.serving.exchange import ask
from kvscope_engine.bench.serving.samples import Sample
from kvscope_engine.bench.serving.target import Target
from kvscope_engine.bench.serving.timeline import Timeline
from kvscope_telemetry.foreign.http_get import NoAnswer


@dataclass(frozen=True, slots=True)
class Driven:
    """A run that is over."""

    timelines: list[Timeline]
    duration_s: float
    cpu_share: float
    """Of one core, taken by this process: near 1 the client was what was measured."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How requests come."""

    starts_s: Sequence[float]
    max_concurrency: int | None = None
    timeout_s: float = 3600.0
    """For one request, its wait in the server's queue included."""


def drive(target: Target, samples: Sequence[Sample], pace: Pace, tell: Callable[[int], None]) -> Driven:
    """Ask them all; `tell` hears how many have ended. KeyboardInterrupt hangs up on all."""
    gc.collect()
    cpu_s, begun_s = time.process_time(), time.perf_counter()
    timelines = asyncio.run(_all(target, samples, pace, tell))
    duration_s = time.perf_counter() - begun_s
    return Driven(timelines, duration_s, (time.process_time() - cpu_s) / duration_s)


async def _all(target: Target, samples: Sequence[Sample], pace: Pace, tell: Callable[[int], None]) -> list[Timeline]:
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    gate = contextlib.nullcontext() if pace.max_concurrency is None else asyncio.Semaphore(pace.max_concurrency)
    num_ended = 0

    async def one(sample: Sample) -> Timeline:
        nonlocal num_ended
        async with gate:
            timeline = await ask(target, sample, pace.timeout_s)
        num_ended += 1
        tell(num_ended)
        return timeline

    async with asyncio.TaskGroup() as group:
        tasks: list[asyncio.Task[Timeline]] = []
        for sample, start_s in zip(samples, pace.starts_s, strict=True):
            if (wait_s := begun_s + start_s - loop.time()) > 0:
                await asyncio.sleep(wait_s)
            tasks.append(group.create_task(one(sample)))
    return [task.result() for task in tasks]


def count_tokens(timelines: Sequence[Timeline], codec: Codec) -> None:
    """Of answers whose server told no usage: their text's tokens where they are known, else their pieces."""
    for timeline in timelines:
        if not timeline.error and not timeline.num_output_tokens:
            timeline.num_output_tokens = _counted(timeline.pieces, codec)


def _counted(pieces: Sequence[str], codec: Codec) -> int:
    with contextlib.suppress(NoAnswer):  # the server whose tokens these are may have ended
        if codec.is_exact:
            return len(codec.encode("".join(pieces)))
    return len(pieces)
