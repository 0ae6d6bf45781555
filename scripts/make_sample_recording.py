"""Creates the sample recording: a real engine with a pool that is too small for its load.

    python scripts/make_sample_recording.py resources/kvscope_resources/sample.mcap

Starts `kvscope-engine serve --record` with the default model, 64 blocks, a little host memory and disk, and sends
requests for half a minute: short chats; long documents with several questions each (shared prefixes); several
completions of one prompt (their blocks are copied on write); one request that is aborted; one that can never fit.
Speculative tokens are proposed from n-grams of the text. The pool runs full: requests are preempted and swapped, and
prefixes are evicted, offloaded to disk and loaded again. The time before the first step is removed. Prints a summary of
the recording.

    python scripts/make_sample_recording.py --hybrid resources/kvscope_resources/sample-hybrid.mcap

does the same with a hybrid variant of the default model (`hybrid_model.py`): recurrent states are cached for prefixes,
copied to requests with the same beginning, and evicted.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path

from hybrid_model import make as make_hybrid

from kvscope_telemetry.exports.run_summary import digest
from kvscope_telemetry.exports.span import span_of
from kvscope_telemetry.messages.commands import Abort, ChatMessage, Command, Submit
from kvscope_telemetry.messages.sampling_params import SamplingParams
from kvscope_telemetry.messages.telemetry import Frame
from kvscope_telemetry.recordings.overview import read_overview
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.save import save
from kvscope_telemetry.source import SourceState
from kvscope_telemetry.sources.live_source import LiveSource

OPTIONS = (
    *("--model", "default", "--device", "cpu", "--num-gpu-blocks-override", "64", "--max-num-seqs", "12"),
    *("--max-model-len", "1024", "--max-num-batched-tokens", "256", "--preemption", "swap", "--seed", "7"),
    *("--kv-host-memory", "14MiB", "--kv-disk", "24MiB"),
    *("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}'),
)
HYBRID_OPTIONS = (
    *("--device", "cpu", "--num-gpu-blocks-override", "96", "--max-num-seqs", "6", "--max-model-len", "1024"),
    *("--max-num-batched-tokens", "128", "--seed", "7", "--state-checkpoints", "12", "--state-interval", "128"),
    *("--kv-host-memory", "12MiB", "--preemption", "swap"),
)
LONG_TEXT_FILE = "the-verdict.txt"
MAX_WAITING = 5
SYSTEM_PROMPT = "You are a librarian who answers in plain words and never in more than a short paragraph."
QUESTIONS = (
    "Who speaks here, and to whom?",
    "What is the house like? Quote two details.",
    "Retell it in three sentences.",
    "What does the speaker not say outright?",
)


def main() -> int:
    """Create the recording. Returns the exit code: 1 if the recording lacks a required event or is too large."""
    parser = argparse.ArgumentParser(description="Make the sample recording.")
    parser.add_argument("out", type=Path, metavar="FILE.mcap")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long new requests come (default: 30)")
    parser.add_argument("--hybrid", action="store_true", help="of a model with recurrent layers")
    args = parser.parse_args()
    args.out.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvscope-sample-") as folder:
        options, whole = OPTIONS, Path(folder) / "whole.mcap"
        if args.hybrid:
            make_hybrid(Path(folder) / "hybrid-of-default")
            options = ("--model", "./hybrid-of-default", *HYBRID_OPTIONS)
        record(whole, Path(folder), args.seconds, options)
        trim(whole, args.out)
    return print_summary(args.out, HYBRID_REQUIRED_COUNTS if args.hybrid else REQUIRED_COUNTS)


def record(out: Path, folder: Path, seconds: float, options: Sequence[str]) -> None:
    program = Path(sys.executable).with_name("kvscope-engine")
    command = [str(program), "serve", "--endpoint", f"ipc://{folder}", "--record", str(out), "--record-text", *options]
    engine = subprocess.Popen(command, cwd=folder, start_new_session=True)
    try:
        with LiveSource(f"ipc://{folder}/telemetry") as source:
            source.wait(lambda: source.status.state is SourceState.LIVE, 300.0)
            time.sleep(1.0)
            send_requests(source, seconds)
    finally:
        engine.send_signal(signal.SIGTERM)
        engine.wait(30.0)


def trim(whole: Path, out: Path) -> None:
    """Save the recording from one second before the first step, so that a new user does not see an empty window."""
    recording, part = Recording.open(whole), whole.with_name("part.mcap")
    steps = (at_s for at_s, message in recording.messages() if isinstance(message, Frame) and message.batch.number)
    save(recording, part, max(next(steps, 0.0) - 1.0, 0.0))
    # Saved again: a live recording has many small chunks, so that a crash loses little, and is a seventh larger.
    save(Recording.open(part), out)


def send_requests(source: LiveSource, seconds: float) -> None:
    """Send the `commands` for `seconds` (a slow machine sends fewer of them), then wait up to 25 s for running
    requests.
    """
    began_s = time.monotonic()
    for pause_s, command in commands():
        time.sleep(pause_s)
        while num_waiting(source) > MAX_WAITING:
            time.sleep(0.1)
        if time.monotonic() - began_s > seconds:
            break
        source.send(command)
    deadline_s = time.monotonic() + 25.0
    while time.monotonic() < deadline_s and num_waiting(source) + source.mirror.counters.num_running:
        time.sleep(0.5)
    time.sleep(1.5)


def num_waiting(source: LiveSource) -> int:
    source.update_mirror()
    return source.mirror.counters.num_waiting


def commands() -> Iterator[tuple[float, Command]]:
    """Yield the commands in order, each with the seconds to wait before it."""
    chats = [json.loads(line)["prompt"] for line in _text("prompts.jsonl").splitlines()][:30]
    paragraphs = [text for text in _text(LONG_TEXT_FILE).split("\n\n") if len(text) > 200]
    for number in range(200):
        wave = number // 8
        pause_s = 0.35 if wave % 2 else 1.2  # calm, then rush, then calm
        kind = number % 8
        name = f"request-{number}"
        if kind in (0, 3, 5):
            excerpt = paragraphs[wave % len(paragraphs)][:1200]
            question = QUESTIONS[kind % len(QUESTIONS)]
            yield pause_s, _submit(name, f"{excerpt}\n\n{question}", 160)
        elif kind == 6:
            yield pause_s, _submit(name, chats[number % len(chats)], 90, n=3)
        else:
            yield pause_s, _submit(name, chats[number % len(chats)], 200)
        if number == 9:
            yield 0.2, _submit("too-long", "all work and no play " * 900, 400)
        if number == 12:
            yield 0.4, Abort(request_id=name)


def _submit(name: str, text: str, max_tokens: int, n: int = 1) -> Submit:
    turns = (ChatMessage(role="system", content=SYSTEM_PROMPT), ChatMessage(role="user", content=text))
    sampling = SamplingParams(temperature=0.7, seed=len(text), max_tokens=max_tokens, min_tokens=50, n=n)
    return Submit(request_id=name, messages=turns, sampling=sampling)


def _text(name: str) -> str:
    return (resources.files("kvscope_resources") / name).read_text(encoding="utf-8")


REQUIRED_COUNTS = (
    *("preemptions", "swapped_blocks", "evicted_blocks", "copied_blocks", "offloaded_blocks", "loaded_blocks"),
    *("cached_tokens", "accepted_tokens", "aborted", "refused"),
)
HYBRID_REQUIRED_COUNTS = (
    "preemptions",
    "swapped_blocks",
    "evicted_blocks",
    "loaded_blocks",
    "cached_tokens",
    "aborted",
    "refused",
)


def print_summary(path: Path, required: Sequence[str]) -> int:
    """Print a summary of the recording. Returns 1 if a required event is missing or the file has 1 MB or more, else
    0.
    """
    recording = Recording.open(path)
    summary = digest(recording, read_overview(recording), span_of(recording))
    counts = {name: summary.totals[name] for name in required}
    print(
        f"{path}: {summary.length_s:.1f} s, {path.stat().st_size / 1e6:.2f} MB, {summary.totals['admitted']} requests"
    )
    print(", ".join(f"{name} {count}" for name, count in counts.items()))
    missing = [name for name, count in counts.items() if not count]
    if missing or path.stat().st_size >= 1_000_000:
        print(f"not good enough: nothing of {missing}" if missing else "too large", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
