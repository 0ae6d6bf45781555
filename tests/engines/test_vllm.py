"""What is published of vLLM equals vLLM's own objects, row by row and step by step."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pytest
from tests.warm_python import PipedProcess, WarmPython

from kvscope_telemetry.ledger import NO_OWNER, BlockState, Tier
from kvscope_telemetry.messages.request_state import RequestState, WaitsFor
from kvscope_telemetry.messages.telemetry import Frame
from kvscope_telemetry.mirror.mirror import Mirror

from .watching import FrameByFrame, wait_for

NUM_STEPS = int(os.environ.get("KVSCOPE_ENGINES_STEPS", "2000"))
NUM_BLOCKS = os.environ.get("KVSCOPE_ENGINES_BLOCKS", "64")
_MASK = (1 << 64) - 1


class DrivenScheduler:
    """vLLM's scheduler in its own process, driven without a model. A client watches it if an endpoint is given."""

    def __init__(self, warm: WarmPython, env: dict[str, str], model: Path, folder: Path, options: list[str]) -> None:
        self.truth = folder / "truth.jsonl"
        fixed = {"--model": model, "--steps": NUM_STEPS, "--num-blocks": NUM_BLOCKS, "--truth": self.truth}
        words = [str(word) for option in fixed.items() for word in option]
        program = "import vllm_scheduler; vllm_scheduler.main()"
        self.process = PipedProcess(warm, ["-c", program, "drive", *words, *options], env)
        self._endpoint = env.get("KVSCOPE_INSIDE")
        self.watcher: FrameByFrame | None = None

    def watch(self) -> None:
        """Wait until it can be watched, and watch it."""
        assert self._endpoint is not None
        self.wait("ready")
        wait_for(Path(self._endpoint.removeprefix("ipc://")) / "telemetry")
        self.watcher = FrameByFrame(self._endpoint, self.go_on)

    def wait(self, word: str) -> None:
        for line in self.process.stdout:
            if line.strip() == b"impossible":
                self.process.wait()
                pytest.skip("this version of vLLM cannot do it")
            if line.strip() == word.encode():
                return
        raise AssertionError(f"the driver ended: {self.process.wait()}")

    def go_on(self, step: int = 0) -> None:
        """Let it run, or report the step up to which it was watched."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(b"%d\n" % step)
            self.process.stdin.flush()

    def close(self) -> None:
        if self.watcher is not None:
            self.watcher.close()
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@pytest.fixture
def drive(warm_vllm, engine_env, model_folder, tmp_path) -> Iterator[Any]:
    """Function that drives a watched scheduler: `drive(kind, seed, *options)`."""
    driven: list[DrivenScheduler] = []

    def start(kind: str, seed: int, *more: str) -> DrivenScheduler:
        env = engine_env | {"KVSCOPE_INSIDE": f"ipc://{tmp_path}/inside"}
        options = ["--kind", kind, "--seed", str(seed), *more]
        driven.append(DrivenScheduler(warm_vllm, env, model_folder, tmp_path, options))
        driven[-1].watch()
        return driven[-1]

    yield start
    for each in driven:
        each.close()


@pytest.fixture(scope="session")
def unwatched_truth(warm_vllm, engine_env, model_folder, tmp_path_factory) -> Callable[[str, int], str]:
    """Function that returns what a scheduler without kvscope wrote: `unwatched_truth(kind, seed)`."""

    @functools.cache
    def run(kind: str, seed: int) -> str:
        env = {name: value for name, value in engine_env.items() if name != "KVSCOPE_INSIDE"}
        options = ["--kind", kind, "--seed", str(seed)]
        driven = DrivenScheduler(warm_vllm, env, model_folder, tmp_path_factory.mktemp("plain"), options)
        driven.wait("ready")
        driven.go_on()
        driven.wait("done")
        driven.close()
        return driven.truth.read_text()

    return run


def hash_of(value: str | None) -> int:
    """Return the published hash: the last 64 bits, with other ones in each group."""
    if value is None:
        return 0
    data = bytes.fromhex(value)
    group = int.from_bytes(data[-4:], "big")
    return (int.from_bytes(data[:-4], "big") & _MASK) ^ (group * 0x9E3779B97F4A7C15 & _MASK)


def differences(mirror: Mirror, truth: dict[str, Any], sizes: tuple[int, ...]) -> list[str]:
    """Return where the mirror and vLLM differ."""
    found = []
    num_blocks, requests = mirror.hello.cache.num_blocks, mirror.requests
    ledger = mirror.ledger.part(0, num_blocks)
    refs = np.array(truth["ref_counts"])
    hashes = np.array([hash_of(value) for value in truth["hashes"]], np.uint64)
    state = np.where(refs > 0, BlockState.ACTIVE, np.where(hashes != 0, BlockState.CACHED, BlockState.FREE))
    filled, owner_of, group_of = np.zeros(len(refs), int), {}, {}
    for request_id, tables in truth["tables"].items():
        for group, table in enumerate(tables):
            for place, block in enumerate(table):
                room = min(max(truth["computed"][request_id] - place * sizes[group], 0), sizes[group])
                filled[block] = max(filled[block], room)
                owner_of.setdefault(block, []).append(request_id)
                group_of[block] = group
    in_no_table = (hashes != 0) & ~np.isin(np.arange(len(refs)), list(group_of))  # unused, or held while it is copied
    filled[in_no_table] = [sizes[group] for group in ledger.group[in_no_table]]
    filled[truth["leaving"]] = ledger.filled[truth["leaving"]]  # of requests that have ended
    rows = slice(1, None)  # the null block belongs to vLLM itself
    for name, expected in (("ref_count", refs), ("hash", hashes), ("state", state), ("filled", filled)):
        wrong = np.flatnonzero(getattr(ledger, name)[rows] != expected[rows]) + 1
        found += [f"{name} of {block}: {getattr(ledger, name)[block]}, not {expected[block]}" for block in wrong[:3]]
    found += [
        f"group of {block}: {ledger.group[block]}, not {group}"
        for block, group in group_of.items()
        if block and ledger.group[block] != group
    ]
    numbers = dict(zip(requests.request_ids, requests.number.tolist(), strict=True))
    for block in range(1, len(refs)):
        owner = int(ledger.owner[block])
        holders = [numbers[request_id] for request_id in owner_of.get(block, ())]
        if (owner == NO_OWNER) != (state[block] == BlockState.FREE):
            found.append(f"owner of {block}: {owner} where the state is {state[block]}")
        if not hashes[block] and holders and owner not in holders:
            found.append(f"owner of {block}: {owner}, held by {holders}")
    alive = requests.state != RequestState.FINISHED
    told = {request_id for request_id, is_alive in zip(requests.request_ids, alive, strict=True) if is_alive}
    found += [f"requests: {sorted(told ^ set(truth['tables']))} differ"] if told != set(truth["tables"]) else []
    for request_id, tables in truth["tables"].items():
        if request_id not in numbers:
            continue
        row = requests.row_of(numbers[request_id])
        assert row is not None
        for group, table in enumerate(tables):
            told_table = requests.table(numbers[request_id], group).tolist()
            if told_table != table:
                found.append(f"table {group} of {request_id}: {told_table}, not {table}")
        for name, column in (("computed", "num_computed_tokens"), ("outputs", "num_output_tokens")):
            if getattr(requests, column)[row] != truth[name][request_id]:
                found.append(f"{name} of {request_id}: {getattr(requests, column)[row]}, not {truth[name][request_id]}")
        if requests.num_preemptions[row] != truth["preemptions"][request_id]:
            found.append(f"preemptions of {request_id}")
        if (requests.state[row] == RequestState.RUNNING) != (request_id in truth["running"]):
            found.append(f"state of {request_id}: {requests.state[row]}")
    order = ledger.eviction_order
    queued = np.flatnonzero(order)
    if (told_queue := queued[np.argsort(order[queued])].tolist()) != truth["free"]:
        found.append(f"order of eviction: {told_queue}, not {truth['free']}")
    for request_id, status in truth["statuses"].items():
        row = requests.row_of(numbers.get(request_id, -1))
        if row is not None and (requests.waits_for[row] == WaitsFor.REMOTE_KV) != (status == "WAITING_FOR_REMOTE_KVS"):
            found.append(f"{request_id} waits for {requests.waits_for[row]}, not {status}")
    counters = mirror.counters
    if [counters.draft_tokens, counters.accepted_tokens] != truth["drafts"]:
        found.append(f"drafts: {counters.draft_tokens}, {counters.accepted_tokens}, not {truth['drafts']}")
    if (counters.num_running, counters.num_waiting) != (len(truth["running"]), truth["waiting"]):
        found.append(f"running, waiting: {counters.num_running}, {counters.num_waiting}")
    if truth["below"]:
        return found + below_differences(mirror, truth["below"])
    return found + host_differences(mirror, truth, sizes)


def below_differences(mirror: Mirror, below: list[Any]) -> list[str]:
    """Return the same for a second pool, whose first block is unused."""
    ledger, size = mirror.ledger.part(mirror.hello.cache.num_blocks, mirror.hello.cache.num_rows), 16
    refs = np.array([count for count, _ in below[1:]])
    hashes = np.array([hash_of(value) for _, value in below[1:]], np.uint64)
    state = np.where(refs > 0, BlockState.ACTIVE, np.where(hashes != 0, BlockState.CACHED, BlockState.FREE))
    found: list[str] = []
    filled = np.where(hashes != 0, size, 0)
    for name, expected in (("ref_count", refs), ("state", state), ("hash", hashes), ("filled", filled)):
        told = getattr(ledger, name)[1:]
        wrong = np.flatnonzero(told != expected)
        found += [f"{name} of {row + 1} below: {told[row]}, not {expected[row]}" for row in wrong[:3]]
    return found


def host_differences(mirror: Mirror, truth: dict[str, Any], sizes: tuple[int, ...]) -> list[str]:
    """Return the same for offloaded blocks."""
    cache, found = mirror.hello.cache, []
    ledger = mirror.ledger.part(cache.num_blocks, cache.num_rows)
    per_place = truth["blocks_per_place"]
    refs, hashes = np.zeros(ledger.num_blocks, int), np.zeros(ledger.num_blocks, np.uint64)
    filled, group = np.zeros(ledger.num_blocks, int), np.zeros(ledger.num_blocks, int)
    for key, place, count in truth["host"]:
        rows = slice(place * per_place, (place + 1) * per_place)
        group[rows] = int(key[-8:], 16)
        refs[rows] = 1 if count < 0 else count
        if count >= 0:
            filled[rows], hashes[rows.stop - 1] = sizes[int(key[-8:], 16)], hash_of(key)
            skipped = slice(rows.start, rows.start + truth["skipped"].get(str(place), 0))
            filled[skipped] = refs[skipped] = group[skipped] = 0
    state = np.where(refs > 0, BlockState.ACTIVE, np.where(filled > 0, BlockState.CACHED, BlockState.FREE))
    last = np.arange(ledger.num_blocks) % per_place == per_place - 1
    assert (ledger.tier == Tier.HOST).all()
    for name, expected in (("ref_count", refs), ("state", state), ("filled", filled), ("group", group)):
        wrong = np.flatnonzero(getattr(ledger, name) != expected)
        found += [f"{name} of host {row}: {getattr(ledger, name)[row]}, not {expected[row]}" for row in wrong[:3]]
    wrong = np.flatnonzero((ledger.hash != hashes) & last)
    found += [f"hash of host {row}: {ledger.hash[row]}, not {hashes[row]}" for row in wrong[:3]]
    wrong = np.flatnonzero(~last & (filled > 0) & ((ledger.hash == 0) | (ledger.hash != np.roll(ledger.parent, -1))))
    found += [f"host {row} is not the parent of the next" for row in wrong[:3]]
    pool = mirror.ledger.part(0, cache.num_blocks)
    own = dict(zip(pool.hash.tolist(), pool.parent.tolist(), strict=True))
    found += [
        f"parent of host {row}: {ledger.parent[row]}, the pool has {own[value]}"
        for row, value in enumerate(ledger.hash.tolist())
        if value and value in own and own[value] != ledger.parent[row]
    ]
    return found


def truth_at(lines: TextIO, step: int) -> dict[str, Any]:
    """Return what was written after a step; it may be published before it is written."""
    line, end = "", time.monotonic() + 10
    while time.monotonic() < end:
        line += lines.readline()
        if line.endswith("\n"):
            found: dict[str, Any] = json.loads(line)
            if found["step"] == step:
                return found
            line = ""
    raise AssertionError(f"no truth of step {step}")


def num_below(mirror: Mirror, frame: Frame, move: str) -> int:
    """Return how many rows of the host tier changed, or blocks were loaded."""
    ids = np.frombuffer(getattr(frame.moves, move), "<u4")
    is_host = mirror.ledger.tier[ids] == Tier.HOST
    return int(np.count_nonzero(~is_host if move == "loaded" else is_host))


SILENCE_S = 30
"""Seconds without a frame after which a test stops waiting for the last step."""
MAX_AHEAD = 8
"""Maximum number of steps that a scheduler runs ahead of the watcher, so that its socket drops no frame, and a snapshot
after lost frames skips few: how many steps are compared does not depend on the machine's speed.
"""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "kind",
    [
        "full",
        "window",
        "state",
        "cached-state",
        "drafts",
        "loads",
        "offload",
        "offload-chunks",
        "offload-window",
        "offload-window-chunks",
        "second-pool",
    ],
)
def test_published_blocks_and_requests_equal_those_of_a_running_vllm(kind, drive):
    assert_rows_are_equal(kind, drive(kind, 7, "--max-ahead", str(MAX_AHEAD)))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["full", "state", "offload", "second-pool"])
def test_rows_published_many_steps_late_equal_those_of_the_step(kind, drive):
    """The plugin's thread may get no time for many steps: it must then not read vLLM's objects as they are by then."""
    assert_rows_are_equal(kind, drive(kind, 7, "--max-ahead", str(MAX_AHEAD), "--publish-every-s", "0.2"))


def assert_rows_are_equal(kind: str, driven: DrivenScheduler) -> None:
    """Compare each step's published rows with vLLM's own, with some frames lost."""
    watcher, wrong, kinds, num_compared = driven.watcher, [], set(), 0
    assert watcher is not None
    moved = dict.fromkeys(("saved", "loaded", "evicted"), 0)
    watcher.begin()
    driven.go_on()
    with driven.truth.open() as lines:
        for frame in watcher.frames(seconds=SILENCE_S, until=NUM_STEPS):
            moved = {name: number + num_below(watcher.mirror, frame, name) for name, number in moved.items()}
            kinds |= {event.kind for event in frame.events}
            if not frame.timings.schedule_ns:
                continue  # the frame covers what happened between two steps, and the truth whole steps
            if frame.step % 211 == 0:
                watcher.lose = 3
            truth = truth_at(lines, frame.step)
            found = differences(watcher.mirror, truth, watcher.mirror.hello.cache.block_sizes)
            wrong += [f"step {frame.step}: {each}" for each in found]
            num_compared += 1
            if len(wrong) > 10:
                break
    assert not wrong, "\n".join(wrong[:10])
    print(json.dumps({"kind": kind, "steps compared": num_compared, "frames lost": watcher.num_lost}))
    assert num_compared > 0.9 * NUM_STEPS, "the others came while a snapshot was asked for"
    assert watcher.num_lost > 0
    assert all(moved.values()) if kind.startswith(("offload", "second")) else not moved["saved"]
    expected = {"admitted", "resumed", "preempted", "evicted", "finished", "aborted", "note"}
    assert expected - kinds <= ({"evicted", "note"} if kind == "state" else set())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["cached-state", "long-state", "long-state-window"])
def test_prefix_hits_are_multiples_of_the_reported_smallest_hit(kind, drive):
    """If a state has longer blocks than other groups, vLLM may find a part of one, or only whole blocks."""
    driven = drive(kind, seed=7)
    driven.watcher.begin()
    driven.go_on()
    hits = {
        event.num_tokens
        for frame in driven.watcher.frames(seconds=SILENCE_S, until=NUM_STEPS)
        for event in frame.events
        if event.kind in ("admitted", "resumed")
    }
    cache = driven.watcher.mirror.hello.cache
    print(json.dumps({"kind": kind, "blocks": cache.block_sizes, "told": cache.smallest_hit, "hits": sorted(hits)}))
    assert any(hits)
    assert math.gcd(*hits) == cache.smallest_hit


@pytest.mark.parametrize(
    "hook",
    [
        "_before_schedule",
        "_after_schedule",
        "_before_update",
        "_after_update",
        "_added",
        "_preempted",
        "_finished",
        "_allocated",
        "_hit",
        "_cached",
        "record_event",
    ],
)
def test_failed_hook_does_not_change_vllm(hook, drive, unwatched_truth):
    kind = "offload" if hook == "record_event" else "full"
    driven = drive(kind, 3, "--breaking", hook)
    driven.watcher.begin()  # otherwise, the goodbye could come before the subscription
    driven.go_on()
    driven.wait("done")
    reason = driven.watcher.goodbye(seconds=60)
    assert reason.startswith("kvscope stopped watching: RuntimeError in ")
    assert reason.endswith(": broken by a test")
    assert driven.truth.read_text() == unwatched_truth(kind, 3)
