"""What is published of vLLM equals vLLM's own objects, row by row and step by step."""

from __future__ import annotations

import json
import math
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pytest

from kvscope_telemetry.ledger import NO_OWNER, BlockState, Tier
from kvscope_telemetry.messages.request_state import RequestState, WaitsFor
from kvscope_telemetry.messages.telemetry import Frame
from kvscope_telemetry.mirror.mirror import Mirror

from .watching import FrameByFrame, wait_for

DRIVER = Path(__file__).with_name("vllm_scheduler.py")
NUM_STEPS = int(os.environ.get("KVSCOPE_ENGINES_STEPS", "2000"))
NUM_BLOCKS = os.environ.get("KVSCOPE_ENGINES_BLOCKS", "64")
_MASK = (1 << 64) - 1


class DrivenScheduler:
    """vLLM's scheduler in its own process, driven without a model, and a client that watches it."""

    def __init__(
        self, engines: Path, env: dict[str, str], model: Path, folder: Path, kind: str, seed: int, *more: str
    ) -> None:
        self.truth = folder / "truth.jsonl"
        endpoint = f"ipc://{folder}/inside"
        options = [
            "--model",
            str(model),
            "--kind",
            kind,
            "--steps",
            str(NUM_STEPS),
            "--num-blocks",
            NUM_BLOCKS,
            "--truth",
            str(self.truth),
        ]
        self.process = subprocess.Popen(
            [
                str(engines / "bin/python"),
                str(DRIVER),
                "drive",
                *options,
                "--seed",
                str(seed),
                *(more or ("--pause-s", "0.004")),
            ],
            env=env | {"KVSCOPE_INSIDE": endpoint, "VLLM_LOGGING_LEVEL": "ERROR"},  # nobody reads its output
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.wait("ready")
        wait_for(folder / "inside" / "telemetry")
        self.watcher = FrameByFrame(endpoint)

    def wait(self, word: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip() == "impossible":
                self.process.communicate()
                pytest.skip("this version of vLLM cannot do it")
            if line.strip() == word:
                return
        raise AssertionError(f"the driver ended: {self.process.wait()}")

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def close(self) -> None:
        self.watcher.close()
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def drive(engines, engine_env, model_folder, tmp_path) -> Iterator[Any]:
    driven: list[DrivenScheduler] = []

    def start(kind: str, seed: int, *more: str) -> DrivenScheduler:
        driven.append(DrivenScheduler(engines, engine_env, model_folder, tmp_path, kind, seed, *more))
        return driven[-1]

    yield start
    for each in driven:
        each.close()


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
    driven = drive(kind, seed=7)
    watcher, wrong, kinds, num_compared = driven.watcher, [], set(), 0
    moved = dict.fromkeys(("saved", "loaded", "evicted"), 0)
    watcher.begin()
    driven.go_on()
    with driven.truth.open() as lines:
        for frame in watcher.frames(seconds=5):
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
    assert num_compared > 0.6 * NUM_STEPS, "the others came while a snapshot was asked for"
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
        for frame in driven.watcher.frames(seconds=5)
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
        "_got_new",
        "_hit",
        "_cached",
        "happen",
    ],
)
def test_failed_hook_does_not_change_vllm(hook, drive, tmp_path, engines, engine_env, model_folder):
    kind = "offload" if hook == "happen" else "full"
    driven = drive(kind, 3, "--breaking", hook)
    driven.go_on()
    driven.wait("done")
    reason = driven.watcher.goodbye(seconds=10)
    assert reason.startswith("kvscope stopped watching: RuntimeError in ")
    assert reason.endswith(": broken by a test")
    (tmp_path / "plain").mkdir()
    plain = {name: value for name, value in engine_env.items() if name != "KVSCOPE_INSIDE"}
    options = ["--model", str(model_folder), "--steps", str(NUM_STEPS), "--num-blocks", NUM_BLOCKS, "--seed", "3"]
    options += ["--kind", kind]
    subprocess.run(
        [str(engines / "bin/python"), str(DRIVER), "drive", *options, "--truth", str(tmp_path / "plain/truth.jsonl")],
        env=plain,
        input="\n\n",
        text=True,
        check=True,
        capture_output=True,
    )
    assert driven.truth.read_text() == (tmp_path / "plain/truth.jsonl").read_text()
