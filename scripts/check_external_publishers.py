"""Attach to the real publishers of vLLM and SGLang and compare the mirror with the published blocks.

    pip download --no-deps --dest wheels vllm==0.33.0 vllm==0.23.0 sglang==0.5.23
    python scripts/check_external_publishers.py wheels

Only the KV event module of each wheel is run, in a separate process, with stubs for the heavy modules that it imports.
The mirror is compared in three situations: attached before the publisher starts, attached late, and after a restart of
the publisher with different events. Then the module's decoder reads the output of our publisher. Without wheels, the
check is skipped with a message. Exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import http.server
import random
import subprocess
import sys
import tempfile
import threading
import time
import types
import zipfile
from collections.abc import Iterable, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from kvscope_telemetry.collectors.external_address import ExternalAddress
from kvscope_telemetry.collectors.external_source import ExternalSource
from kvscope_telemetry.kv_events.batches import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KvEvent
from kvscope_telemetry.kv_events.encoding import encode_batch
from kvscope_telemetry.ledger import BlockState, Tier

NUM_BATCHES: Final = 400
TIMEOUT_S: Final = 60.0
MODULES: Final = {
    "vllm": ("vllm/distributed/kv_events.py", "vllm/config/kv_events.py"),
    "sglang": ("sglang/srt/disaggregation/kv_events.py",),
}
MEDIA: Final = {"vllm": ("GPU", "CPU"), "sglang": ("GPU", "CPU_PINNED")}
ExpectedBlocks = dict[tuple[int, Tier], int]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheels", type=Path, help="folder with wheels of vLLM and SGLang, or an unpacked module")
    parser.add_argument("--publish", nargs=3, metavar=("ENGINE", "ENDPOINT", "SEED"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.publish:
        publish(args.wheels, args.publish[0], args.publish[1], int(args.publish[2]))
        return 0
    wheels = sorted([*args.wheels.glob("vllm-*.whl"), *args.wheels.glob("sglang-*.whl")])
    if not wheels:
        print(f"skipped: no wheels of vLLM or SGLang in {args.wheels}")
        return 0
    return int(0 in list(map(check, wheels)))


def check(wheel: Path) -> bool:
    """Check one wheel and print the results. Returns whether all checks passed."""
    engine, version = wheel.name.split("-")[:2]
    with tempfile.TemporaryDirectory(prefix="kvscope-publishers-") as name, Metrics(engine) as metrics:
        folder = Path(name)
        with zipfile.ZipFile(wheel) as archive:
            for path in MODULES[engine]:
                archive.extract(path, folder)
        endpoint = f"ipc://{folder}/events"
        text = f"{engine}://127.0.0.1:{metrics.port}"
        address = ExternalAddress.parse(text, kv_events=endpoint, replay=f"{endpoint}-replay")
        module = load_module(folder, engine)
        media = supported_media(module, engine)
        with ExternalSource(address) as early:
            results = []
            for seed in (1, 2):
                with Publisher(folder, engine, endpoint, seed):
                    results.append(compare(early, media, seed, "from the beginning" if seed == 1 else "restarted"))
                    with ExternalSource(address) as late:
                        results.append(compare(late, media, seed, "joined late"))
        decoder_result = check_decoder(module)
    print(f"{engine} {version}: {'; '.join([*results, decoder_result])}")
    return not any("DIFFERS" in result for result in (*results, decoder_result))


def compare(source: ExternalSource, media: tuple[str, ...], seed: int, situation: str) -> str:
    """Wait up to `TIMEOUT_S` until the mirror equals the published blocks. Returns a description of the result."""
    expected: ExpectedBlocks = {}
    for events in history(media, seed):
        apply_events(expected, events)
    deadline_s = time.monotonic() + TIMEOUT_S
    while mirrored_blocks(source) != expected and time.monotonic() < deadline_s:
        if source.update_mirror() is None:
            time.sleep(0.01)
    if mirrored_blocks(source) == expected:
        return f"{situation} {len(expected)} blocks of {NUM_BATCHES} batches right"
    return f"{situation} DIFFERS: {len(mirrored_blocks(source))} of {len(expected)} blocks ({source.status.reason})"


def mirrored_blocks(source: ExternalSource) -> ExpectedBlocks:
    """Return the cached blocks of the mirror as {(hash, tier): parent}."""
    ledger = source.mirror.ledger
    rows = np.flatnonzero(ledger.state == BlockState.CACHED)
    columns = (ledger.hash[rows].tolist(), ledger.tier[rows].tolist(), ledger.parent[rows].tolist())
    return {(block_hash, Tier(tier)): parent for block_hash, tier, parent in zip(*columns, strict=True)}


def apply_events(blocks: ExpectedBlocks, events: Iterable[KvEvent]) -> None:
    for event in events:
        if isinstance(event, AllBlocksCleared):
            blocks.clear()
            continue
        tier = Tier.HBM if event.medium == "GPU" else Tier.HOST
        parent = event.parent_block_hash or 0 if isinstance(event, BlockStored) else 0
        for block_hash in event.block_hashes:
            if isinstance(event, BlockStored):
                blocks.setdefault((block_hash, tier), parent)
                parent = block_hash
            else:
                blocks.pop((block_hash, tier), None)


def history(media: tuple[str, ...], seed: int) -> Iterator[list[KvEvent]]:
    """Yield the batches to publish. They depend only on the arguments, so that both processes generate the same
    batches.
    """
    generator = random.Random(seed)
    hashes = [generator.getrandbits(64) | 1 for _ in range(500)]
    for number in range(NUM_BATCHES):
        events: list[KvEvent] = []
        for _ in range(generator.randrange(1, 10)):
            first, medium = generator.randrange(len(hashes) - 4), generator.choice(media)
            run = tuple(hashes[first : first + generator.randrange(1, 5)])
            if generator.randrange(3):
                tokens = tuple(range(16 * len(run)))
                events.append(BlockStored(run, hashes[first - 1] if first else None, tokens, 16, medium=medium))
            else:
                events.append(BlockRemoved(run, medium))
        yield [AllBlocksCleared()] if number == NUM_BATCHES // 3 else events


# The publisher's process.


def publish(folder: Path, engine: str, endpoint: str, seed: int) -> None:
    """Publish all batches, print `published`, and keep running until stdin is closed."""
    module = load_module(folder, engine)
    options: dict[str, Any] = {"endpoint": endpoint, "replay_endpoint": f"{endpoint}-replay", "topic": "kv"}
    publisher = module.ZmqEventPublisher(0, **options)
    for events in history(supported_media(module, engine), seed):
        publisher.publish(
            module.KVEventBatch(ts=time.time(), events=[to_external_event(module, engine, event) for event in events])
        )
    print("published", flush=True)
    sys.stdin.read()
    publisher.shutdown()


def to_external_event(module: Any, engine: str, event: KvEvent) -> Any:
    """Convert our event to one of the external module. SGLang's hashes are signed; some of vLLM's hashes are 32-byte
    digests.
    """
    if isinstance(event, AllBlocksCleared):
        return module.AllBlocksCleared()
    hashes = [_external_hash(engine, each) for each in event.block_hashes]
    if isinstance(event, BlockRemoved):
        return module.BlockRemoved(block_hashes=hashes, **supported_fields(module.BlockRemoved, medium=event.medium))
    parent = event.parent_block_hash
    return module.BlockStored(
        block_hashes=hashes,
        parent_block_hash=None if parent is None else _external_hash(engine, parent),
        token_ids=list(event.token_ids),
        block_size=event.block_size,
        **supported_fields(module.BlockStored, lora_id=None, medium=event.medium, lora_name=None),
    )


def supported_fields(kind: Any, **fields: object) -> dict[str, object]:
    return {name: value for name, value in fields.items() if name in kind.__struct_fields__}


def supported_media(module: Any, engine: str) -> tuple[str, ...]:
    """Return the storage media of the module's events, or ("GPU",) for versions whose events have no medium."""
    return MEDIA[engine] if supported_fields(module.BlockRemoved, medium="") else ("GPU",)


def _external_hash(engine: str, block_hash: int) -> int | bytes:
    if engine == "sglang":
        return block_hash - (1 << 64) if block_hash >> 63 else block_hash
    return b"\7" * 24 + block_hash.to_bytes(8, "big") if block_hash % 7 == 0 else block_hash


def load_module(folder: Path, engine: str) -> Any:
    """Import the KV event module of the wheel, with stubs for the engine's modules that it imports."""
    from pydantic import BaseModel  # SGLang's configuration needs it

    assert BaseModel is not None
    if engine == "vllm":
        register_stub("vllm.logger", init_logger=lambda name: __import__("logging").getLogger(name))
        network = dict.fromkeys(("get_ip", "get_tcp_uri", "is_valid_ipv6_address", "split_zmq_path"))
        register_stub("vllm.utils.network_utils", **network)
        register_stub("vllm.v1.core.kv_cache_utils", ExternalBlockHash=bytes | int)
        register_stub("vllm.config.utils", config=dataclasses.dataclass)
    else:
        register_stub("sglang.srt.runtime_context", get_parallel=None)
        register_stub("sglang.srt.utils.network", NetworkAddress=None)
    for path in reversed(MODULES[engine]):
        name = path.removesuffix(".py").replace("/", ".")
        spec = spec_from_file_location(name, folder / path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def register_stub(name: str, **members: object) -> None:
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        if path not in sys.modules:
            sys.modules[path] = types.ModuleType(path)
            sys.modules[path].__path__ = []
    vars(sys.modules[name]).update(members)


def check_decoder(module: Any) -> str:
    """Check that the external decoder reads our encoding in the layout of its version. Returns a description of
    the result.
    """
    is_array = bool(module.BlockStored.__struct_config__.array_like)
    ours = [BlockStored((1, 2), None, (5, 6), 1, medium="GPU"), BlockRemoved((1,), "CPU"), AllBlocksCleared()]
    batch = msgspec.msgpack.Decoder(module.KVEventBatch).decode(encode_batch(EventBatch(1.5, ours, 0), arrays=is_array))
    stored, removed, cleared = batch.events
    is_right = (stored.block_hashes, stored.token_ids, removed.block_hashes) == ([1, 2], [5, 6], [1])
    if supported_fields(module.BlockRemoved, medium=""):
        is_right &= (stored.medium, removed.medium) == ("GPU", "CPU")
    is_right &= type(cleared).__name__ == "AllBlocksCleared"
    return "its decoder reads ours" if is_right else "its decoder DIFFERS"


class Publisher:
    """Runs the external publisher in another process. Entering the context waits until it has published all batches."""

    def __init__(self, folder: Path, engine: str, endpoint: str, seed: int) -> None:
        command = [sys.executable, __file__, str(folder), "--publish", engine, endpoint, str(seed)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __enter__(self) -> None:
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"published\n":
            raise SystemExit("the publisher did not start")

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=TIMEOUT_S)


class Metrics:
    """HTTP server for the smallest metrics page by which a client can identify the engine."""

    def __init__(self, engine: str) -> None:
        body = {
            "vllm": 'vllm:num_requests_running 1\nvllm:cache_config_info{block_size="16",num_gpu_blocks="600"} 1\n',
            "sglang": "sglang:num_running_reqs 1\nsglang:page_size 16\nsglang:max_total_num_tokens 9600\n",
        }[engine].encode()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200 if self.path == "/metrics" else 404)
                self.send_header("Content-Type", "text/plain")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Metrics:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


if __name__ == "__main__":
    sys.exit(main())
