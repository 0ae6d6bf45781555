"""A new host needs only hooks and a translator: a mirror that follows a pretended engine equals the engine's
objects.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.engines.watching import FrameByFrame
from tests.inside.pretended_host.engine import SIZE, Job, PretendedEngine
from tests.inside.pretended_host.watch import watch

from kvscope_app.views.page_map import color_modes
from kvscope_telemetry.ledger import BlockState
from kvscope_telemetry.messages.commands import BlockText, GetBlockText
from kvscope_telemetry.messages.telemetry import Event

FOLDER = Path(__file__).parent / "pretended_host"
NUM_BLOCKS = 16


class WatchedEngine:
    """A pretended engine, and a client that follows it."""

    def __init__(self, endpoint: str) -> None:
        self.engine = PretendedEngine(NUM_BLOCKS)
        self.jobs: dict[str, Job] = {}
        self.events: list[Event] = []
        self.thread = watch(self.engine, endpoint)
        self.client = FrameByFrame(endpoint)
        self.client.begin()
        self._frames = self.client.frames(seconds=10)

    def submit(self, name: str, prompt: list[int], max_tokens: int) -> None:
        self.jobs[name] = Job(name, prompt, max_tokens)
        self.engine.submit(self.jobs[name])

    def step(self) -> list[Event]:
        """Run a step, and return its events once the mirror has its frame."""
        self.engine.step()
        frame = next(self._frames)
        self.events += frame.events
        return list(frame.events)

    def run(self) -> list[Event]:
        """Run until no job is left, and return all events."""
        told: list[Event] = []
        while self.engine.running or self.engine.waiting:
            told += self.step()
        return told

    def differences(self) -> list[str]:
        """Return where the mirror differs from the engine's objects."""
        found, ledger, requests = [], self.client.mirror.ledger, self.client.mirror.requests
        for block in self.engine.pool:
            row = block.index
            kind = BlockState.ACTIVE if block.num_users else BlockState.CACHED if block.digest else BlockState.FREE
            shown = (ledger.state[row], ledger.ref_count[row], bool(ledger.hash[row]))
            if shown != (kind, block.num_users, bool(block.digest)):
                found.append(f"block {row}: {shown}, not {block}")
        for job in (*self.engine.running, *self.engine.waiting):
            row = requests.row_of(number := requests.newest_with(job.name))
            if row is None:
                found.append(f"{job.name} is not shown")
                continue
            figures = (int(requests.num_computed_tokens[row]), int(requests.num_output_tokens[row]))
            if figures != (job.num_done, len(job.answer)):
                found.append(f"{job.name}: {figures}, not {job.num_done}, {len(job.answer)}")
            if requests.table(number).tolist() != [block.index for block in job.blocks]:
                found.append(f"table of {job.name}")
        return found


@pytest.fixture
def watched_engine(tmp_path: Path) -> Iterator[WatchedEngine]:
    made = WatchedEngine(f"ipc://{tmp_path}/pretended")
    yield made
    made.thread.close()
    made.client.close()


def cause_of(events: list[Event], kind: str) -> str:
    return next(event.cause for event in events if event.kind == kind)


@pytest.mark.parametrize("seed", range(2))
def test_mirror_follows_the_engine_under_random_load(watched_engine: WatchedEngine, seed: int) -> None:
    chance = random.Random(seed)
    prefixes = [[chance.randrange(50) for _ in range(12)] for _ in range(3)]
    for step in range(200):
        if chance.random() < 0.3 and len(watched_engine.engine.running) + len(watched_engine.engine.waiting) < 5:
            tail = [chance.randrange(50) for _ in range(chance.randrange(1, 6))]
            watched_engine.submit(
                f"job{step}", chance.choice(prefixes)[: chance.randrange(13)] + tail, chance.randrange(1, 20)
            )
        watched_engine.step()
        assert watched_engine.differences() == []
    kinds = {event.kind for event in watched_engine.events}
    assert kinds == {"admitted", "resumed", "preempted", "evicted", "finished"}
    counters = watched_engine.client.mirror.counters
    assert counters.preemptions == sum(event.kind == "preempted" for event in watched_engine.events)
    assert counters.evicted_blocks == sum(
        event.num_blocks for event in watched_engine.events if event.kind == "evicted"
    )
    assert counters.cached_tokens > 0


def test_page_map_colors_active_shared_cached_and_free_blocks(watched_engine: WatchedEngine) -> None:
    prompt = list(range(9))
    watched_engine.submit("first", prompt, 1)
    watched_engine.run()
    watched_engine.submit("second", prompt, 20)
    watched_engine.submit("third", prompt, 20)
    watched_engine.step()
    watched_engine.step()
    ledger = watched_engine.client.mirror.ledger
    keys = color_modes.STATE.keys(ledger, slice(None), SIZE, watched_engine.client.mirror.step).tolist()
    second, third = (
        [block.index for block in job.blocks] for job in (watched_engine.jobs["second"], watched_engine.jobs["third"])
    )
    shared = set(second) & set(third)
    assert {keys[block] for block in shared} == {color_modes.SHARED}
    assert {keys[block] for block in {*second, *third} - shared} == {color_modes.ACTIVE}
    held = {*second, *third}
    assert all(keys[block] == color_modes.FREE for block in range(NUM_BLOCKS) if block not in held)
    watched_engine.run()
    cached = np.flatnonzero(watched_engine.client.mirror.ledger.state == BlockState.CACHED)
    reply = watched_engine.client.ask(GetBlockText(blocks=(int(second[0]),)))
    assert cached.size
    assert isinstance(reply, BlockText)
    assert reply.contents[0].token_ids == (0, 1, 2, 3)


def test_preemption_and_eviction_name_the_request_that_needed_memory(watched_engine: WatchedEngine) -> None:
    watched_engine.submit("old", list(range(8)), 1)
    watched_engine.run()
    watched_engine.submit("first", [30 + n for n in range(10)], 30)
    watched_engine.submit("second", [10 + n for n in range(10)], 30)
    told = watched_engine.run()
    preempted = next(event for event in told if event.kind == "preempted")
    assert preempted.number == 3
    assert f"request #{preempted.other} needed more blocks and none was available" in preempted.cause
    evicted = next(event for event in told if event.kind == "evicted")
    assert "no block was free; " in evicted.cause
    assert f"for request #{evicted.other}" in evicted.cause
    watched_engine.submit("again", list(range(8)), 1)
    assert "the block from token 0 was evicted at step" in cause_of(watched_engine.run(), "admitted")


def test_admission_says_why_not_more_was_cached(watched_engine: WatchedEngine) -> None:
    watched_engine.submit("first", list(range(9)), 1)
    told = watched_engine.run()
    assert "no cached prefix matches" in cause_of(told, "admitted")
    assert cause_of(told, "finished") == "reached its limit of 1 new token after 1 token; 3 blocks released"
    watched_engine.submit("second", [*range(8), *range(40, 46)], 1)
    cause = cause_of(watched_engine.run(), "admitted")
    assert "8 of 14 tokens were there already, 2 blocks in the pool" in cause
    assert "no cached prefix continues after token 8" in cause


def test_example_integration_of_another_engine_has_less_than_600_lines() -> None:
    sizes = {path.name: len(path.read_text().splitlines()) for path in FOLDER.glob("*.py") if path.name != "engine.py"}
    assert sizes["pretended_translator.py"] < 400
    assert sum(sizes.values()) < 600
