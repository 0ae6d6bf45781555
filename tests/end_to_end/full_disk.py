"""Fill the disk under recordings: of the window, its past, `kvscope record` and `kvscope-engine serve --record`.

    python -m tests.end_to_end.full_disk [window] [past] [record] [serve]

The disks are small file systems in memory, mounted in a private namespace (`unshare`, of util-linux). Each time the
recording is complete and a line reports the full disk, the engine is still watched, and a new recording works once
there is room. Prints the output; exits with 2 where such mounts are not permitted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.end_to_end.desktop_process import PATIENCE_S, DesktopProcess, simulated_engine

from kvscope_telemetry.messages.commands import Finished, Submit
from kvscope_telemetry.messages.sampling_params import SamplingParams
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.source import SourceState
from kvscope_telemetry.sources.live_source import LiveSource

OWN_MOUNTS = "KVSCOPE_OWN_MOUNTS"
NOT_ALLOWED = 2
TINY_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def small_disk(path: Path, kilobytes: int) -> Path:
    """Mount a new file system of that size at `path`."""
    path.mkdir(parents=True, mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k,mode=700", "kvscope-small", str(path)]
    subprocess.run(mount, check=True)
    return path


def complete_recording(path: Path) -> Recording:
    """Return the recording in `path`, which must be complete."""
    recording = Recording.open(path)
    assert recording.info.is_complete, recording.damage_details
    assert recording.num_damaged == 0, recording.damage_details
    assert recording.info.num_frames > 0
    assert not path.with_name(path.name + ".part").exists()
    return recording


def assert_continues(desktop: DesktopProcess) -> None:
    """Check that the window shows later and later steps."""

    def step() -> int:
        desktop.send_line("look")
        return int(desktop.wait_for("at ").split()[1])

    before = step()
    while step() <= before:
        pass


def check_window(folder: Path, endpoint: str) -> None:
    """A recording of the window ends; the next one begins once there is room."""
    disk = small_disk(folder / "disk", 100)
    with DesktopProcess(endpoint, folder) as desktop:
        desktop.wait_for("live")
        desktop.send_line(f"record {disk / 'first.mcap'}")
        desktop.wait_for("recording")
        print(
            desktop.wait_for("notice The recording ended: No space left on device; what came before is in first.mcap")
        )
        frames = complete_recording(disk / "first.mcap").info.num_frames
        assert_continues(desktop)
        (disk / "first.mcap").unlink()
        desktop.send_line(f"record {disk / 'second.mcap'}")
        desktop.wait_for("recording")
        print(desktop.wait_for("notice The recording ended"))
        print(f"{frames} frames in the first, {complete_recording(disk / 'second.mcap').info.num_frames} in the second")
        assert desktop.quit() == 0


def check_past(folder: Path, endpoint: str) -> None:
    """There is no room for the past of the window; a recording elsewhere continues."""
    small_disk(folder / "cache", 200)
    with DesktopProcess(endpoint, folder) as desktop:
        desktop.wait_for("live")
        desktop.send_line(f"record {folder / 'elsewhere.mcap'}")
        desktop.wait_for("recording")
        print(desktop.wait_for("notice History is not being recorded"))
        assert_continues(desktop)
        assert desktop.quit() == 0
    complete_recording(folder / "elsewhere.mcap")


def check_record(folder: Path, endpoint: str) -> None:
    """`kvscope record` ends with what it has."""
    disk = small_disk(folder / "disk", 100)
    words = [sys.executable, "-m", "kvscope_app.main", "record", endpoint, "--out", str(disk / "x.mcap")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S)
    said = done.stderr.splitlines()[-1]
    print(said)
    assert done.returncode == 1, done.stderr
    assert "No space left on device; what came before is in x.mcap" in said
    complete_recording(disk / "x.mcap")


def check_serve(folder: Path, _: str) -> None:
    """An engine that records itself keeps answering."""
    disk, model, own = small_disk(folder / "disk", 48), folder / "model.json", folder / "own"
    model.write_text(json.dumps(TINY_MODEL))
    own.mkdir(mode=0o700)
    words = [sys.executable, "-m", "kvscope_engine.cli.main", "serve", "--endpoint", f"ipc://{own}"]
    words += ["--model", f"dummy:{model}", "--num-gpu-blocks-override", "64", "--record", str(disk / "x.mcap")]
    with subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as engine:
        assert engine.stderr is not None
        try:
            with LiveSource(f"ipc://{own}/telemetry") as source:
                assert source.wait(lambda: source.status.state is SourceState.LIVE, PATIENCE_S)
                while not (disk / "x.mcap").exists():
                    _assert_answers(source)
                _assert_answers(source)
        finally:
            engine.terminate()
            stderr = engine.stderr.read().splitlines()
    print(next(line for line in stderr if "stopped early: No space left on device; the engine continues" in line))
    complete_recording(disk / "x.mcap")


def _assert_answers(source: LiveSource) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    source.send(Submit(request_id="one", prompt_token_ids=tuple(range(3, 60)), sampling=sampling))
    assert source.wait(lambda: any(isinstance(reply, Finished) for reply in source.poll_replies()), PATIENCE_S)


PARTS: dict[str, Callable[[Path, str], None]] = {
    "window": check_window,
    "past": check_past,
    "record": check_record,
    "serve": check_serve,
}


def main() -> int:
    """Run the named parts, or all."""
    if OWN_MOUNTS not in os.environ:
        if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
            print("no file system can be mounted here: unshare -rm is not allowed", file=sys.stderr)
            return NOT_ALLOWED
        command = ["unshare", "-rm", sys.executable, "-m", "tests.end_to_end.full_disk", *sys.argv[1:]]
        os.execvpe("unshare", command, {**os.environ, OWN_MOUNTS: "1"})
    for name in sys.argv[1:] or PARTS:
        with tempfile.TemporaryDirectory(prefix="kvscope-full-") as place:
            folder = Path(place)
            (folder / "engine").mkdir(mode=0o700)
            endpoint = f"ipc://{folder}/engine/telemetry"
            print(f"{name}:", flush=True)
            try:
                with simulated_engine(endpoint, blocks=2_000, rate=200.0):
                    PARTS[name](folder, endpoint)
            finally:
                for mount in ("disk", "cache"):
                    subprocess.run(["umount", "-l", str(folder / mount)], capture_output=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
