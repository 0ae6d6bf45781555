"""What HTTP costs, on one machine, and how even many streams are.

    python scripts/bench_http.py [--model M] [--streams 200] [--tokens 64] [--rounds 5] [--json]

Starts an engine with the API beside it and loads the same model here for `Engine.generate`; rounds of that, and of the
same requests over HTTP whole and streamed, take turns, so that a busy machine is as busy for each. What is printed of
costs is the median of the rounds' ratios. The client is raw sockets on one loop: what it costs counts against HTTP too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from kvscope_engine import Engine, EngineConfig, SamplingParams
from kvscope_engine.http.child import HttpChild
from kvscope_telemetry.keys.connections import NO_KEY
from kvscope_telemetry.messages.commands import Finished, Submit
from kvscope_telemetry.messages.wire import decode_reply, encode
from kvscope_telemetry.sockets.client_sockets import ClientSockets

PROMPT = "Write a long story about a lighthouse keeper. Part"
BLOCKS = 4096


@dataclass
class Heard:
    """Of one request."""

    num_tokens: int = 0
    times_s: list[float] = field(default_factory=list)
    is_whole: bool = False


async def ask(address: tuple[str, int], prompt: str, num_tokens: int, *, stream: bool) -> Heard:
    """One request on a connection of its own."""
    heard = Heard()
    body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": stream}
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    reader, writer = await asyncio.open_connection(*address, limit=1 << 24)
    writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data)
    last = b""
    while chunk := await reader.read(1 << 16):
        heard.times_s += [time.monotonic()] if b'"text":' in chunk else []
        last = (last + chunk)[-2000:]
    writer.close()
    place = last.rfind(b'"completion_tokens":')
    heard.num_tokens = int(last[place + 20 :].partition(b",")[0]) if place >= 0 else 0
    heard.is_whole = heard.num_tokens == num_tokens and (not stream or b"data: [DONE]" in last)
    return heard


async def all_of(address: tuple[str, int], prompts: list[str], num_tokens: int, *, stream: bool) -> list[Heard]:
    """All at once."""
    return await asyncio.gather(*(ask(address, prompt, num_tokens, stream=stream) for prompt in prompts))


def over_http(
    address: tuple[str, int], prompts: list[str], num_tokens: int, *, stream: bool
) -> tuple[float, list[Heard]]:
    """Tokens a second, and what was heard of each."""
    started = time.monotonic()
    heard = asyncio.run(all_of(address, prompts, num_tokens, stream=stream))
    return sum(one.num_tokens for one in heard) / (time.monotonic() - started), heard


def generated(engine: Engine, prompts: list[str], num_tokens: int) -> float:
    """Tokens a second of `Engine.generate`."""
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    submits = [Submit(request_id="-", prompt=prompt, raw=True, sampling=sampling) for prompt in prompts]
    started = time.monotonic()
    done = sum(len(completion.token_ids) for completion in engine.generate(submits))
    return done / (time.monotonic() - started)


def over_commands(endpoint: str, prompts: list[str], num_tokens: int) -> float:
    """Tokens a second of a client of the command socket: what being served costs without HTTP."""
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    sockets = ClientSockets(endpoint, subscribes=False)
    try:
        while not sockets.is_connected:
            sockets.wait(50)
        started, num_tokens, num_left = time.monotonic(), 0, len(prompts)
        for index, prompt in enumerate(prompts):
            request_id = f"bench-{started}-{index}"
            sockets.send(encode(Submit(request_id=request_id, prompt=prompt, raw=True, sampling=sampling)))
        while num_left:
            sockets.wait(100)
            for data in sockets.receive_replies(10_000):
                reply = decode_reply(data)
                if isinstance(reply, Finished):
                    num_left -= 1
                    num_tokens += reply.usage.completion_tokens
        return num_tokens / (time.monotonic() - started)
    finally:
        sockets.close()


def cpu_s(pid: int) -> float:
    """Of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def gaps(heard: list[Heard]) -> tuple[list[float], list[float]]:
    """Time between tokens in ms: the median of each stream, and all of them."""
    own = [[1e3 * (b - a) for a, b in zip(one.times_s, one.times_s[1:], strict=False)] for one in heard]
    return [statistics.median(one) for one in own if one], sorted(gap for one in own for gap in one)


def children() -> set[int]:
    """Processes that this thread started."""
    return {int(pid) for pid in Path("/proc/thread-self/children").read_text().split()}


def wait_ready(address: tuple[str, int]) -> None:
    """Until it answers."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        try:
            if asyncio.run(ask(address, "x", 1, stream=False)).is_whole:
                return
        except OSError:
            pass
        time.sleep(0.5)
    raise SystemExit("the engine does not get ready")


def measure(
    args: argparse.Namespace, address: tuple[str, int], endpoint: str, engine: Engine, pids: tuple[int, int]
) -> dict[str, object]:
    """All rounds."""
    rates: dict[str, list[float]] = {"generate": [], "commands": [], "http": [], "stream": []}
    shares: list[float] = []
    for number in range(-1, args.rounds):
        prompts = [f"{PROMPT} {number}.{index}" for index in range(args.requests)]
        round_rates = {
            "generate": generated(engine, prompts, args.tokens),
            "commands": over_commands(endpoint, prompts, args.tokens),
            "http": over_http(address, prompts, args.tokens, stream=False)[0],
        }
        before = [cpu_s(pid) for pid in pids]
        round_rates["stream"] = over_http(address, prompts, args.tokens, stream=True)[0]
        engine_s, http_s = (cpu_s(pid) - start for pid, start in zip(pids, before, strict=True))
        shares += [http_s / engine_s] if number >= 0 else []
        for name, rate in round_rates.items():
            rates[name] += [rate] if number >= 0 else []  # the first warms up

    def cost(name: str, than: str) -> float:
        return 1 - statistics.median(a / b for a, b in zip(rates[name], rates[than], strict=True))

    prompts = [f"{PROMPT} s{index}" for index in range(args.streams)]
    _, heard = over_http(address, prompts, args.tokens, stream=True)
    medians, every = gaps(heard)
    return {
        "requests": args.requests,
        "tokens": args.tokens,
        "tokens_per_s": {name: round(statistics.median(found), 1) for name, found in rates.items()},
        "serving_costs": cost("commands", "generate"),
        "http_costs_beside_serving": cost("http", "commands"),
        "http_streams_cost_beside_serving": cost("stream", "commands"),
        "http_costs_in_all": cost("http", "generate"),
        "http_streams_cost_in_all": cost("stream", "generate"),
        "cpu_of_http_by_cpu_of_engine_while_streaming": statistics.median(shares),
        "streams": args.streams,
        "streams_lost": sum(not one.is_whole for one in heard),
        "gap_ms_median_of_streams": [min(medians), statistics.median(medians), max(medians)],
        "gap_ms_p99": every[int(0.99 * (len(every) - 1))],
    }


def main() -> int:
    """Print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--requests", type=int, default=32, help="at a time, for the throughput")
    parser.add_argument("--streams", type=int, default=200, help="at a time, for the evenness")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    config = EngineConfig(
        model=args.model, num_gpu_blocks_override=BLOCKS, max_num_seqs=256, enable_prefix_caching=False
    )
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        endpoint = f"ipc://{folder}"
        words = ["serve", "--endpoint", endpoint, "--model", args.model, "--num-gpu-blocks-override", str(BLOCKS)]
        words += ["--max-num-seqs", "256", "--no-enable-prefix-caching"]
        command = [sys.executable, "-m", "kvscope_engine.cli.main", *words]
        child = HttpChild("127.0.0.1:0", api_key="", options=[], tell=lambda line: print(line, file=sys.stderr))
        host, _, port = child.url.removeprefix("http://").rpartition(":")
        with (Path(folder) / "log").open("w") as log:
            served = subprocess.Popen(command, stdout=log, stderr=log, env=dict(os.environ))
        try:
            before = children()
            with child.running(endpoint, NO_KEY), Engine(config) as engine:
                (http_pid,) = children() - before
                wait_ready((host, int(port)))
                found = measure(args, (host, int(port)), endpoint, engine, (served.pid, http_pid))
        finally:
            served.terminate()
            served.wait(30)
    print(json.dumps(found) if args.json else "\n".join(f"{name:46} {value}" for name, value in found.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
