"""What a recording of a real engine under load weighs: `kvscope-engine serve --record`, and some requests at a time.

    python scripts/bench_engine_recording.py --seconds 60 --requests 4 [--model default]

The engine and the model are the ones that users have; what the file is made of is said by `bench_recording.py --open`.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kvscope_telemetry.messages.commands import Finished, Refused, Submit
from kvscope_telemetry.messages.sampling_params import SamplingParams
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.source import SourceState
from kvscope_telemetry.sources.live_source import LiveSource

START_S = 300.0


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--requests", type=int, default=4, help="that run at a time")
    parser.add_argument("--model", default="default")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvscope-bench-") as folder:
        (Path(folder) / "engine").mkdir(mode=0o700)
        path, endpoint = Path(folder) / "engine.mcap", f"ipc://{folder}/engine"
        command = [
            str(Path(sys.executable).with_name("kvscope-engine")),
            "serve",
            "--endpoint",
            endpoint,
            "--record",
            str(path),
        ]
        with subprocess.Popen([*command, "--model", args.model], stdout=subprocess.DEVNULL) as engine:
            try:
                with LiveSource(f"{endpoint}/telemetry") as source:
                    _load(source, args)
            finally:
                engine.send_signal(signal.SIGINT)
        minutes = Recording.open(path).info.duration_s / 60
        print(f"{path.stat().st_size / 1e6 / minutes:.2f} MB a minute of a real engine, from its start on")
        script = Path(__file__).with_name("bench_recording.py")
        return subprocess.call([sys.executable, str(script), "--open", str(path)])


def _load(source: LiveSource, args: argparse.Namespace) -> None:
    ready = source.wait(lambda: source.status.state is SourceState.LIVE, START_S)
    assert ready, f"no engine within {START_S:.0f} s: {source.status.reason}"
    until_s, count, running = time.monotonic() + args.seconds, 0, set[str]()
    while time.monotonic() < until_s:
        while len(running) < args.requests:
            count += 1
            running.add(f"load-{count}")
            prompt = f"Tell a long story, the {count}th of many, about {'a very ' * (count % 40)}old lighthouse."
            source.send(Submit(request_id=f"load-{count}", prompt=prompt, sampling=SamplingParams(max_tokens=200)))
        source.update_mirror()
        running -= {reply.request_id for reply in source.take_replies() if isinstance(reply, Finished | Refused)}
        time.sleep(0.02)
    print(f"{count} requests, {source.status.frames_received} frames in {args.seconds:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
