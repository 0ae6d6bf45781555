"""What is published of SGLang equals its own objects, row by row, whenever pages were copied; its answers do not
change.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

import httpx
import numpy as np
import pytest

from kvscope_telemetry.ledger import NO_OWNER, BlockState
from kvscope_telemetry.messages.commands import Abort, Control, Done, GetBlockText
from kvscope_telemetry.messages.request_state import RequestState
from kvscope_telemetry.messages.telemetry import Counters
from kvscope_telemetry.mirror.mirror import Mirror

from .watching import FrameByFrame, wait_for

ROUNDS = int(os.environ.get("KVSCOPE_ENGINES_ROUNDS", "6"))
TEXTS = [f"Chapter {n}. " + " ".join(str(n * m) for m in range(20 + 7 * n)) for n in range(8)]
ENTRY_POINTS = """[sglang.srt.plugins]
kvscope = kvscope_inside.sglang.plugin:load
kvscope_truth = sglang_truth:load
"""


@pytest.fixture(scope="session")
def sglang_env(engines, engine_env, tmp_path_factory) -> dict[str, str]:
    """The environment with kvscope's plugin, and with one that writes the state of SGLang's objects."""
    if not (engines / "sglang").is_dir():
        pytest.skip("this environment has no SGLang")
    plugins = tmp_path_factory.mktemp("plugins")
    info = plugins / "kvscope-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvscope\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    found = [
        plugins,
        engines / "stubs",
        engines / "sglang",
        Path(__file__).parent,
        Path(__file__).parents[2] / "engine",
    ]
    return engine_env | {"PYTHONPATH": ":".join(map(str, found)), "SGLANG_USE_CPU_ENGINE": "1", "KVSCOPE_DEBUG": "1"}


class Server:
    """An SGLang server on its own port; it is watched if a folder is given."""

    def __init__(
        self, engines: Path, env: dict[str, str], model: Path, log: Path, watched: Path | None, *options: str
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.endpoint, self.log = f"ipc://{watched}/s", log
        if watched is not None:
            env = {"KVSCOPE_INSIDE": self.endpoint, "KVSCOPE_TRUTH": f"{watched}/truth"} | env
        fixed = "--device cpu --attention-backend torch_native --disable-cuda-graph --mem-fraction-static 0.3"
        command = [
            *(str(engines / "bin/python"), "-m", "sglang.launch_server", "--model-path", str(model)),
            *("--served-model-name", "default", "--host", "127.0.0.1", "--port", str(self.port)),
            *fixed.split(),
            *options,
        ]
        with log.open("w") as out:
            self.process = subprocess.Popen(
                command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self) -> None:
        end_s = time.monotonic() + 400
        while time.monotonic() < end_s:
            assert self.process.poll() is None, "the server ended: " + self.log.read_text()[-3000:]
            try:
                if httpx.get(f"http://127.0.0.1:{self.port}/health", timeout=20).status_code == 200:
                    return
            except httpx.HTTPError:
                time.sleep(0.2)
        raise AssertionError("the server did not answer in time")

    def ask(self, text: str, max_tokens: int, rid: str | None = None) -> str:
        # SGLang knows the length of requests that ignore the end of text, and retracts none of them.
        params = {"max_new_tokens": max_tokens, "min_new_tokens": max_tokens, "temperature": 0}
        body = {"text": text, "sampling_params": params} | ({"rid": rid} if rid else {})
        reply = httpx.post(f"http://127.0.0.1:{self.port}/generate", json=body, timeout=300)
        reply.raise_for_status()
        found: str = reply.json()["text"]
        return found

    def answers(self, texts: list[str], max_tokens: int = 48) -> list[str]:
        """Return the greedy answers of all texts, submitted at once."""
        with ThreadPoolExecutor(len(texts)) as pool:
            return list(pool.map(lambda text: self.ask(text, max_tokens), texts))

    def flush(self) -> bool:
        return httpx.post(f"http://127.0.0.1:{self.port}/flush_cache", timeout=60).status_code == 200

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


@pytest.fixture
def serve(engines, sglang_env, model_folder, tmp_path) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(watched: Path | None, *options: str, **env: str) -> Server:
        log = tmp_path / f"server{len(servers)}.log"
        model = Path(env.pop("KVSCOPE_MODEL", model_folder))
        servers.append(Server(engines, sglang_env | env, model, log, watched, *options))
        return servers[-1]

    yield start
    for each in servers:
        each.close()


def differences(mirror: Mirror, truth: dict[str, Any]) -> list[str]:
    """Return where the mirror and SGLang differ."""
    found: list[str] = []
    ledger, requests, size = mirror.ledger, mirror.requests, truth["page_size"]
    num_rows = truth["num_pages"] + 1
    num_others = truth.get("num_windows", 0), truth.get("num_host_pages", 0)
    assert ledger.num_blocks == num_rows + sum(num_others)
    refs, filled, in_tree = np.zeros(num_rows, int), np.zeros(num_rows, int), np.zeros(num_rows, bool)
    in_tree[truth["in_tree"]] = True
    filled[in_tree] = size
    for request_id, table in truth["tables"].items():
        for place, page in enumerate(table):
            refs[page] += 1
            filled[page] = max(filled[page], min(max(truth["computed"][request_id] - place * size, 0), size))
    state = np.where(refs > 0, BlockState.ACTIVE, BlockState.CACHED)
    state[[page for page in truth["free"] if not refs[page]]] = BlockState.FREE
    state[0] = BlockState.UNMAPPED
    for name, expected in (("ref_count", refs), ("state", state), ("filled", filled)):
        told = getattr(ledger, name)[:num_rows]
        wrong = np.flatnonzero(told != expected)
        found += [f"{name} of {page}: {told[page]}, not {expected[page]}" for page in wrong[:3]]
    wrong = np.flatnonzero((ledger.hash[:num_rows] != 0) != in_tree)
    found += [f"hash of {page}: {ledger.hash[page]}, in the tree: {in_tree[page]}" for page in wrong[:3]]
    hashes = ledger.hash[: num_rows + num_others[0]]
    hashes = hashes[hashes != 0]
    found += ["hashes that several pages have"] if np.unique(hashes).size != hashes.size else []
    owned = ledger.owner[:num_rows] != NO_OWNER
    wrong = np.flatnonzero(owned != ((state == BlockState.ACTIVE) | (state == BlockState.CACHED)))
    found += [f"owner of {page}: {ledger.owner[page]}" for page in wrong[:3]]
    locked = int(np.count_nonzero(in_tree & (ledger.ref_count[:num_rows] > 0))) * size
    is_locked = locked == truth["locked_tokens"] or (truth.get("moving") and locked < truth["locked_tokens"])
    found += [] if is_locked else [f"locked: {locked}, not {truth['locked_tokens']}"]
    numbers = dict(zip(requests.request_ids, requests.number.tolist(), strict=True))
    alive = {
        request_id
        for request_id, kind in zip(requests.request_ids, requests.state.tolist(), strict=True)
        if kind != RequestState.FINISHED
    }
    known = set(truth["tables"]) | set(truth["waiting"])
    found += [f"requests: {sorted(alive ^ known)} differ"] if alive != known else []
    for request_id, table in truth["tables"].items():
        if request_id not in alive:
            continue
        row = requests.row_of(numbers[request_id])
        told_table = requests.table(numbers[request_id], 0).tolist()
        if told_table != table:
            found.append(f"table of {request_id}: {told_table}, not {table}")
        published = table[: truth["published"][request_id]]
        if ledger.parent[published[1:]].tolist() != ledger.hash[published[:-1]].tolist():
            found.append(f"parents of {request_id}")
        if requests.num_output_tokens[row] != truth["outputs"][request_id]:
            found.append(f"outputs of {request_id}: {requests.num_output_tokens[row]}")
        if requests.state[row] != RequestState.RUNNING:
            found.append(f"state of {request_id}: {requests.state[row]}")
    if "host_pages" in truth:
        found += differences_of_host_tier(mirror, truth)
    if "windows" in truth:
        found += differences_of_windows(mirror, truth, {each: numbers[each] for each in alive})
    for request_id in alive & set(truth["retractions"]):
        row = requests.row_of(numbers[request_id])
        if requests.num_preemptions[row] != truth["retractions"][request_id]:
            found.append(f"retractions of {request_id}: {requests.num_preemptions[row]}")
    return found


def differences_of_windows(mirror: Mirror, truth: dict[str, Any], numbers: dict[str, int]) -> list[str]:
    """Return the same for pages of sliding windows."""
    ledger, size, found = mirror.ledger, truth["page_size"], []
    first, end = truth["num_pages"] + 1, truth["num_pages"] + 1 + truth["num_windows"]
    state, refs = ledger.state[first:end], np.zeros(truth["num_windows"] + 1, int)
    free = set((np.flatnonzero(state == BlockState.FREE) + 1).tolist())
    found += (
        [f"free pages of windows: {free ^ set(truth['free_windows'])}"] if free != set(truth["free_windows"]) else []
    )
    found += ["groups"] if (ledger.group[first:end] != 1).any() or ledger.group[:first].any() else []
    own = 0
    for request_id, table in truth["tables"].items():
        begin = max(0, truth["computed"][request_id] - truth["window"]) // size
        begin = min(begin, truth["published"][request_id])
        pages = [truth["windows"][page] for page in table]
        np.add.at(refs, pages[begin:], 1)
        own += sum(page > 0 for page in pages[truth["published"][request_id] :])
        expected = [0] * begin + [page + first - 1 if page else 0 for page in pages[begin:]]
        told = mirror.requests.table(numbers[request_id], 1).tolist() if request_id in numbers else expected
        found += [f"windows of {request_id}: {told}, not {expected}"] if told != expected else []
    wrong = np.flatnonzero(ledger.ref_count[first:end] != refs[1:])
    found += [f"window {place + 1}: {ledger.ref_count[first + place]}, not {refs[place + 1]}" for place in wrong[:3]]
    hashed = int(np.count_nonzero(ledger.hash[first:end]))
    kept = truth["evictable_windows"] + truth["locked_windows"]
    found += [f"pages of windows that the tree has: {hashed}, not {kept}"] if hashed != kept else []
    held = int(np.count_nonzero(state == BlockState.ACTIVE)) - own
    found += [f"held pages of windows: {held} > {truth['locked_windows']}"] if held > truth["locked_windows"] else []
    return found


def differences_of_host_tier(mirror: Mirror, truth: dict[str, Any]) -> list[str]:
    """Return the same for pages in host memory."""
    ledger, first = mirror.ledger, mirror.ledger.num_blocks - truth["num_host_pages"]
    state, found = ledger.state[first:], []
    used, expected = set(np.flatnonzero(state != BlockState.FREE).tolist()), set(truth["host_pages"])
    found += [f"host pages: {sorted(used ^ expected)[:9]} differ"] if used != expected else []
    num_moving = int(np.count_nonzero(state == BlockState.ACTIVE))
    found += (
        [f"{num_moving} host pages move, {truth['moving']} copies"] if (num_moving > 0) != (truth["moving"] > 0) else []
    )
    hashes = ledger.hash[first:][state == BlockState.CACHED]
    found += [f"{np.count_nonzero(hashes == 0)} host pages without a hash"] if (hashes == 0).any() else []
    found += ["hashes that several host pages have"] if np.unique(hashes).size != hashes.size else []
    found += ["owners of host pages"] if (ledger.owner[first:][state != BlockState.FREE] == NO_OWNER).any() else []
    found += ["tiers"] if (ledger.tier[first:] != 1).any() or ledger.tier[:first].any() else []
    return found


def truth_at(lines: TextIO, time_ns: int, seconds: float = 2.0) -> dict[str, Any] | None:
    """Return the state written at that time, or None if a part of the pages was left for later."""
    line, end = "", time.monotonic() + seconds
    while time.monotonic() < end:
        before = lines.tell()
        line = lines.readline()
        if not line.endswith("\n"):
            lines.seek(before)
            time.sleep(0.01)
            continue
        found: dict[str, Any] = json.loads(line)
        if found["time_ns"] == time_ns:
            return found
        if found["time_ns"] > time_ns:
            lines.seek(before)
            return None
    return None


def run_random_prompts(server: Server, seed: int) -> None:
    """Run prompts that share prefixes, more at once than there is room for, and flush in between."""
    chance = random.Random(seed)
    shared = [" ".join(str(chance.randrange(1000)) for _ in range(40)) for _ in range(3)]
    for turn in range(2):
        prompts = [
            " ".join(chance.choice(shared).split()[: chance.randrange(1, 41)]) + f" and {turn} {number} " * 4
            for number in range(10)
        ]
        with ThreadPoolExecutor(7) as pool:
            list(pool.map(lambda prompt: server.ask(prompt, chance.randrange(60, 160)), prompts))
        if turn == 0:
            assert server.flush()


@pytest.fixture(scope="session")
def windows_folder(model_folder, tmp_path_factory) -> Path:
    """The same model with a window in every second layer according to its configuration; its answers make no sense."""
    folder = tmp_path_factory.mktemp("windows")
    for path in model_folder.iterdir():
        (folder / path.name).symlink_to(path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").unlink()
    pattern = [1, 0] * (config["num_hidden_layers"] // 2)
    config |= {"is_hybrid_swa": True, "hybrid_layer_pattern": pattern, "sliding_window": 48}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("page_size", "loop"), [(1, "overlap"), (16, "overlap"), (16, "--disable-overlap-schedule")])
def test_published_sliding_window_pages_equal_those_of_a_running_sglang(
    page_size, loop, serve, windows_folder, tmp_path
):
    options = ["--swa-full-tokens-ratio", "0.5", *([loop] if loop != "overlap" else [])]
    server = serve(
        tmp_path, *small_pool_options(page_size, 960), *options, KVSCOPE_MODEL=str(windows_folder), KVSCOPE_WINDOWS="1"
    )
    server.wait()
    compare(server, tmp_path, {"page size": page_size, "loop": loop, "pools": 2}, 50)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("page_size", "loop", "copies_per_s"),
    [
        (1, "--disable-overlap-schedule", 20),
        (1, "overlap", 20),
        (1, "overlap", 1),
        (16, "--disable-overlap-schedule", 20),
        (16, "overlap", 20),
        (16, "overlap", 1),
    ],
)
def test_published_blocks_and_requests_equal_those_of_a_running_sglang(page_size, loop, copies_per_s, serve, tmp_path):
    """With few copies a second many changes are between two; steps without a GPU are slow."""
    more = [loop] if loop != "overlap" else []
    server = serve(tmp_path, *small_pool_options(page_size, 640), *more, KVSCOPE_TRUTH_COPIES=str(copies_per_s))
    server.wait()
    figures = {"page size": page_size, "loop": loop, "copies a second": copies_per_s}
    compare(server, tmp_path, figures, 50 if copies_per_s > 1 else 10)


def small_pool_options(page_size: int, num_tokens: int) -> list[str]:
    """Return options of a server with a small pool."""
    options = ["--page-size", str(page_size), "--max-total-tokens", str(num_tokens), "--chunked-prefill-size", "64"]
    return [*options, "--max-running-requests", "8", "--schedule-conservativeness", "0.1"]


def compare(server: Server, folder: Path, figures: dict[str, Any], min_compared: int) -> Counters:
    """Compare the published state at each copy of the pages with SGLang's objects."""
    watcher, wrong, kinds, compared, rows, for_whom = FrameByFrame(server.endpoint), [], set(), 0, 0, []
    try:
        watcher.begin()
        with ThreadPoolExecutor(1) as pool, (folder / "truth").open() as lines:
            wait_for(folder / "truth")
            working = pool.submit(run_random_prompts, server, 5)
            first_ns = time.monotonic_ns()
            for frame in watcher.frames(seconds=12):
                kinds |= {event.kind for event in frame.events}
                for_whom += [event.other > 0 for event in frame.events if event.kind == "evicted"]
                if frame.time_ns < first_ns or not (frame.blocks.ids or frame.requests.table_blocks):
                    continue
                truth = truth_at(lines, frame.time_ns, 0.3)
                if truth is None:
                    continue
                found = differences(watcher.mirror, truth)
                wrong += [f"step {frame.step}: {each}" for each in found]
                compared, rows = compared + 1, rows + truth["num_pages"]
                if len(wrong) > 10:
                    break
            working.result()
        print(json.dumps(figures | {"moments": compared, "rows": rows, "wrong": len(wrong)}))
        assert not wrong, "\n".join(wrong[:12])
        assert compared > min_compared
        assert {"admitted", "resumed", "preempted", "evicted", "finished", "note"} <= kinds
        assert for_whom
        assert all(for_whom)
        totals = watcher.mirror.counters
        assert totals.cached_tokens > 0
        assert totals.evicted_blocks > 0
        return totals
    finally:
        watcher.close()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_published_host_memory_pages_equal_those_of_a_running_sglang(policy, serve, tmp_path):
    options = ["--enable-hierarchical-cache", "--hicache-ratio", "1.5", "--hicache-write-policy", policy]
    options += ["--hicache-io-backend", "direct", "--hicache-mem-layout", "layer_first"]
    server = serve(tmp_path, *small_pool_options(16, 640), *options, KVSCOPE_HICACHE="1")
    server.wait()
    totals = compare(server, tmp_path, {"page size": 16, "policy": policy, "tiers": 2}, 50)
    assert min(totals.offloaded_blocks, totals.loaded_blocks) > 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(2))
def test_published_recurrent_states_equal_those_of_sglang(seed, engines, sglang_env, model_folder):
    """SGLang's own pool and tree run without a model, because none with states runs on a CPU."""
    script = Path(__file__).with_name("sglang_states.py")
    command = [str(engines / "bin/python"), str(script), "400", str(seed), str(model_folder)]
    done = subprocess.run(command, env=sglang_env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(figures))
    assert figures["wrong"] == 0, done.stderr[-2000:]
    assert figures["moments"] == 400
    assert min(figures["cached"], figures["evicted"]) > 0


@pytest.mark.timeout(900)
def test_operator_of_a_watched_sglang_can_abort_flush_the_cache_and_read_block_text(serve, tmp_path):
    server = serve(tmp_path, "--max-total-tokens", "4096", "--disable-overlap-schedule")
    server.wait()
    watcher = FrameByFrame(server.endpoint)
    try:
        watcher.begin()
        server.ask("The quick brown fox jumps over", 4)
        list(watcher.frames(1.0))
        cached = np.flatnonzero(watcher.mirror.ledger.hash != 0)
        reply = watcher.ask(GetBlockText(blocks=tuple(cached.tolist())))
        assert "quick" in "".join(each.text for each in sorted(reply.contents, key=lambda each: each.start))
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(server.ask, "Count to a million: 1 2 3", 2000, "mine")
            while "mine" not in watcher.mirror.requests.request_ids:
                next(watcher.frames(10))
            assert isinstance(watcher.ask(Abort(request_id="mine")), Done)
            assert asked.exception(timeout=30) is not None or asked.result() is not None
        list(watcher.frames(1.0))
        assert watcher.mirror.counters.aborted == 1
        assert isinstance(watcher.ask(Control(action="reset_prefix_cache")), Done)
        list(watcher.frames(1.0))
        assert (watcher.mirror.ledger.state[1:] == BlockState.FREE).all()
    finally:
        watcher.close()


@pytest.mark.timeout(900)
def test_watched_sglang_server_gives_the_same_answers_at_nearly_the_same_speed(serve, tmp_path):
    # An idle scheduler would take a CPU core from the other.
    options = ("--max-total-tokens", "2048", "--page-size", "1", "--sleep-on-idle")
    watched, plain = serve(tmp_path, *options, KVSCOPE_TRUTH=""), serve(None, *options)
    watched.wait()
    plain.wait()
    took: dict[Server, list[float]] = {watched: [], plain: []}
    for text in TEXTS:
        assert watched.ask(text, 24) == plain.ask(text, 24)
    for turn in range(ROUNDS):
        texts = [f"{turn} {text}" for text in TEXTS]
        for server in (watched, plain) if turn % 2 else (plain, watched):
            began = time.monotonic()
            server.answers(texts, 32)
            took[server].append(time.monotonic() - began)
    ratio = statistics.median(b / a for a, b in zip(took[watched], took[plain], strict=True))
    seconds = {
        name: round(statistics.median(took[server]), 2) for name, server in (("watched", watched), ("plain", plain))
    }
    print(json.dumps({"throughput watched/plain": round(ratio, 4), "pairs": ROUNDS, "seconds a round": seconds}))
    assert ratio > 0.9


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "hook", ["_before_run_batch", "_after_results", "_added", "_allocated_rows", "_before_free_row", "_pages"]
)
def test_failed_hook_inside_sglang_stops_watching_and_all_requests_are_answered(hook, serve, tmp_path):
    server = serve(tmp_path, "--max-total-tokens", "2048", KVSCOPE_BREAKING=hook)
    server.wait()
    for texts in (TEXTS[:4], TEXTS[4:]):
        assert all(server.answers(texts, 8))
    said = server.log.read_text()
    assert said.count("kvscope stopped watching: RuntimeError") == 1
    assert "SGLang goes on" in said
