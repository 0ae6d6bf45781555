"""Recordings of deterministic engines are run again: bit-equal for every schedule, or the first difference is named."""

from __future__ import annotations

import random
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from kvscope_engine import Engine, EngineConfig, SamplingParams, components
from kvscope_engine.cli.main import main
from kvscope_engine.model.loaded_model import LoadedModel
from kvscope_engine.run_replay import (
    RecordedRun,
    ReplayComparison,
    Replayer,
    check_same_engine,
    config_of_run,
    read_run,
)
from kvscope_engine.server.service import EngineService
from kvscope_kernels.cpu.library import library
from kvscope_telemetry import LiveSource
from kvscope_telemetry.engine_config import SpeculativeConfig
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import Abort, Finished, Reply, Submit, Tokens
from kvscope_telemetry.messages.roles import Role
from kvscope_telemetry.messages.telemetry import TelemetryMessage
from kvscope_telemetry.messages.wire import encode
from kvscope_telemetry.recordings.engine_recorder import EngineRecorder
from kvscope_telemetry.recordings.reader import Recording
from kvscope_telemetry.recordings.writer import RecordingWriter

pytestmark = pytest.mark.skipif(library() is None, reason="no compiler: attention is not the CPU's own")

RUNS: dict[str, dict[str, Any]] = {
    "side by side, in chunks": {"max_num_batched_tokens": 24},
    "with prefixes found": {"max_num_seqs": 2},
    "preempted": {"num_gpu_blocks_override": 44},
}


def submits(count: int) -> list[Submit]:
    """Return prompts that begin alike, greedy and sampled ones, one with several completions."""
    rng = random.Random(5)
    beginning = tuple(rng.choices(range(3, 256), k=21))
    return [
        Submit(
            request_id=f"r{index}",
            prompt_token_ids=beginning[: 21 * (index % 2)]
            + tuple(rng.choices(range(3, 256), k=rng.choice((5, 33, 60)))),
            sampling=SamplingParams(
                max_tokens=11,
                ignore_eos=True,
                temperature=(0.0, 0.8)[index % 2],
                top_p=0.9,
                seed=index if index % 4 == 1 else None,
                n=2 if index == 3 else 1,
                repetition_penalty=1.2 if index == 2 else 1.0,
                logprobs=1 if index == 4 else None,
            ),
        )
        for (index,) in zip(range(count))
    ]


def record(path: Path, config: EngineConfig, asked: Sequence[Submit], *, texts: bool = True) -> Path:
    """Write what `serve --record FILE --record-text` writes."""
    with EngineRecorder(path, texts=texts) as recorder:

        def publish(message: TelemetryMessage) -> None:
            recorder.record(message, encode(message))

        with Engine(config, publish=publish) as engine:
            recorder.add_snapshot(engine.snapshot())
            recorder.add_requests(engine.drain_ended())
            for submit in asked:
                engine.submit(submit)
            while engine.has_unfinished:
                engine.step()
                recorder.add_requests(engine.drain_ended())
    return path


def compare_replay(run: RecordedRun, **options: Any) -> ReplayComparison:
    replayer = Replayer(run)
    with Engine(config_of_run(run.hello, options), publish=replayer.receive) as engine:
        return replayer.replay(engine)


@pytest.fixture(scope="module", autouse=True)
def proofs_made_once() -> Iterator[None]:
    """Prove once per kind of engine that tiles give the same bits, as `test_deterministic.py` checks: these tests start
    70 engines, and a proof takes half of a start.
    """
    proven: dict[tuple[str, ...], tuple[int, ...]] = {}
    prove = components.proven_tiles

    def proven_before(loaded: LoadedModel) -> tuple[int, ...]:
        key = (loaded.info.name, str(loaded.dtype), loaded.quantization, loaded.device.type)
        if key not in proven:
            proven[key] = prove(loaded)
        return proven[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(components, "proven_tiles", proven_before)
        yield


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., str]) -> str:
    return tiny_model(num_hidden_layers=3)


@pytest.fixture(scope="module")
def config(model: str) -> EngineConfig:
    return EngineConfig(
        model=model,
        device="cpu",
        dtype="bfloat16",
        deterministic=True,
        fingerprints=True,
        block_size=4,
        num_gpu_blocks_override=256,
        max_num_batched_tokens=64,
    )


@pytest.fixture(scope="module", params=RUNS)
def recording(request: pytest.FixtureRequest, config: EngineConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of each kind."""
    given = {name: getattr(config, name) for name in config.__dataclass_fields__} | RUNS[request.param]
    path = tmp_path_factory.mktemp("run") / "run.mcap"
    return record(path, EngineConfig(**given), submits(7))


def test_replay_test_recordings_contain_the_chunks_hits_or_preemptions_they_are_named_after(
    recording: Path, request: pytest.FixtureRequest
) -> None:
    frames = list(Recording.open(recording).frames())
    totals, kind = frames[-1].counters, request.node.callspec.params["recording"]
    most = max(len(frame.batch.number) // 4 for frame in frames)
    cut = any(frame.batch.num_prefill_tokens == 24 for frame in frames)
    seen = {
        "side by side, in chunks": cut and most > 4,
        "with prefixes found": totals.cached_tokens > 0,
        "preempted": totals.preemptions > 0,
    }
    assert seen[kind]


def test_replayed_recording_is_bit_equal(recording: Path) -> None:
    run = read_run(recording)
    found = compare_replay(run)
    assert found.lines == [f"bit-equal: 8 requests, {found.num_blocks} blocks, 3 layers, {found.num_logits} tokens"]
    texts = [text.token_ids for text in run.requests]
    blocks = {ids[:end] for ids in texts for end in range(4, len(ids), 4)}  # those of the last token are never computed
    tokens = {ids[: len(ids) - said] for ids in texts for said in range(1, 12)}
    assert (found.num_blocks, found.num_logits) == (len(blocks), len(tokens)), (
        "each is compared, once where texts agree"
    )


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 1},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 16},
        {"speculative_config": SpeculativeConfig(num_speculative_tokens=3, prompt_lookup_min=1)},
        {"num_gpu_blocks_override": 40, "host_kv_memory_bytes": 1 << 22, "preemption": "swap"},
    ],
    ids=["one at a time", "nothing cached, smaller chunks", "guessed ahead", "swapped"],
)
def test_replay_with_another_schedule_is_bit_equal(recording: Path, options: dict[str, Any]) -> None:
    assert compare_replay(read_run(recording), **options).first == ""


@pytest.fixture
def change_weight(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Function that changes a byte of a weight after loading: `change_weight(name)`."""
    from kvscope_engine import components

    load = components.load_model

    def change(name: str) -> None:
        def load_changed(*args: Any, **options: Any) -> Any:
            loaded = load(*args, **options)
            weight = loaded.module.get_parameter(name)
            with torch.no_grad():
                weight.view(torch.uint8).view(-1)[1] ^= 0x01  # of the exponent of a bfloat16
            return loaded

        monkeypatch.setattr(components, "load_model", load_changed)

    return change


@pytest.mark.parametrize(
    ("weight", "where"),
    [
        ("model.layers.2.self_attn.k_proj.weight", "in layer 2 of 3: other keys or values in block 0 of request 'r"),
        ("model.layers.1.mlp.down_proj.weight", "in layer 2 of 3: other keys or values in block 0 of request 'r"),
        ("model.layers.2.mlp.up_proj.weight", "behind the last layer: other logits for token "),
    ],
)
def test_changed_weight_byte_is_found_at_its_layer(
    recording: Path, change_weight: Callable[[str], None], weight: str, where: str
) -> None:
    run = read_run(recording)
    change_weight(weight)
    found = compare_replay(run)
    step = run.fingerprints[0].step
    assert where in found.first
    assert found.lines[0].startswith("the runs part at step ")
    assert "behind" in where or f"at step {step} " in found.first, (
        "the difference was not found in the first step that has it"
    )


def test_replay_command_prints_bit_equal_and_exits_with_0(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(recording)]) == 0
    assert capsys.readouterr().out.startswith("bit-equal: 8 requests, ")


def test_replay_with_another_model_differs_or_is_refused(
    recording: Path, tiny_model: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(recording), "--model", tiny_model(num_hidden_layers=3), "--seed", "5"]) == 1
    assert "in layer 0 of 3" in capsys.readouterr().out
    assert main(["replay", str(recording), "--model", tiny_model(num_hidden_layers=4)]) == 2
    assert "num_layers is 4, and was 3" in capsys.readouterr().err


def test_changed_option_is_refused_even_if_it_is_the_default(
    recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(recording), "--block-size", "16"]) == 2
    assert "block_size is 16, and was 4" in capsys.readouterr().err


def test_repeated_fingerprints_are_compared_once(recording: Path) -> None:
    run = read_run(recording)
    often = RecordedRun(run.hello, run.requests, run.fingerprints * 100)
    assert compare_replay(often).lines == compare_replay(run).lines


def test_recording_without_the_needed_data_is_refused_in_one_line(
    tmp_path: Path, config: EngineConfig, model: str
) -> None:
    plain = EngineConfig(model=model, device="cpu", dtype="float32", num_gpu_blocks_override=64)
    with pytest.raises(BadInput, match=r"its engine was not deterministic; start the engine with --deterministic"):
        read_run(record(tmp_path / "plain.mcap", plain, submits(1)))
    with pytest.raises(BadInput, match="it holds no texts"):
        read_run(record(tmp_path / "silent.mcap", config, submits(1), texts=False))


def test_without_fingerprints_tokens_are_compared(tmp_path: Path, config: EngineConfig) -> None:
    given = {name: getattr(config, name) for name in config.__dataclass_fields__} | {"fingerprints": False}
    run = read_run(record(tmp_path / "tokens.mcap", EngineConfig(**given), submits(2)))
    assert compare_replay(run).lines == ["equal tokens: 2 requests; keys and values were not recorded (--fingerprints)"]
    text = run.requests[1]
    other = replace(text, token_ids=(*text.token_ids[:-1], text.token_ids[-1] ^ 1))
    found = compare_replay(RecordedRun(run.hello, (run.requests[0], other), ()))
    assert found.first == f"in token {len(text.token_ids) - 1} of request 'r1'"


def record_with_aborts(config: EngineConfig, path: Path, asked: Sequence[Submit], after: dict[str, int]) -> RecordedRun:
    """Abort each of these requests after its number of steps."""
    with (
        EngineRecorder(path, texts=True) as recorder,
        Engine(config, publish=lambda message: recorder.record(message, encode(message))) as engine,
    ):
        recorder.add_snapshot(engine.snapshot())
        recorder.add_requests(engine.drain_ended())
        for submit in asked:
            engine.submit(submit)
        step = 0
        while engine.has_unfinished:
            for name in (name for name, at in after.items() if at == step):
                engine.abort(name)
            engine.step()
            step += 1
        recorder.add_requests(engine.drain_ended())
    return read_run(path)


def test_aborted_request_is_compared_as_far_as_it_came(config: EngineConfig, tmp_path: Path) -> None:
    run = record_with_aborts(config, tmp_path / "aborted.mcap", submits(5), {"r0": 0, "r1": 1, "r2": 4})
    said = {
        text.request.request_id: len(text.token_ids) - text.request.num_prompt_tokens for text in whole_requests(run)
    }
    assert said["r0"] == 0, "it was aborted before its first token"
    assert said["r2"] > 0
    found = compare_replay(run)
    assert found.first == ""
    assert found.num_same_tokens == found.num_requests == 6
    assert found.lines[0].startswith("bit-equal: 6 requests, ")
    assert found.lines[1].startswith("not compared: ")
    assert "that only one of the runs" in found.lines[1]


def test_gpu_recording_is_replayed_only_on_a_gpu(recording: Path) -> None:
    """A CPU sums in another order."""
    run = read_run(recording)
    on_gpu = replace(run.hello, device=replace(run.hello.device, kind="cuda", num_threads=0))
    config = config_of_run(on_gpu, {})
    assert (config.device, config.num_threads, config.deterministic) == ("cuda", None, True)
    with pytest.raises(BadInput, match="cannot run the recording again: device is 'cpu', and was 'cuda'"):
        check_same_engine(on_gpu, run.hello)


def whole_requests(run: RecordedRun) -> list[Any]:
    return [text for text in run.requests if text.request is not None]


def test_recording_without_any_token_is_not_called_equal(config: EngineConfig, tmp_path: Path) -> None:
    run = record_with_aborts(config, tmp_path / "none.mcap", submits(2), {"r0": 0, "r1": 0})
    with pytest.raises(BadInput, match="nothing of 2 requests can be compared: each ended before its first token"):
        compare_replay(run)


def test_failed_and_unfinished_requests_are_left_out_and_counted(recording: Path, tmp_path: Path) -> None:
    run = read_run(recording)
    texts = list(Recording.open(recording).texts())
    first, second, *_ = whole_requests(run)
    failed = replace(first, request=replace(first.request, finish_reason="error"))
    kept = [failed if text == first else text for text in texts if text != second]
    path = tmp_path / "failed.mcap"
    with RecordingWriter(path) as writer:
        for message in Recording.open(recording).messages():
            writer.write(message[1], wait=True)
        writer.write_texts(kept, wait=True)
    found = compare_replay(read_run(path))
    assert found.num_requests == 6
    assert found.first == ""
    assert found.left_out[:2] == ("1 request that failed in the recording", "1 request whose end was not recorded")


@pytest.mark.parametrize("quantization", ["int8", "int4", "a8"])
def test_quantization_is_taken_from_the_recording(
    config: EngineConfig, tmp_path: Path, quantization: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {name: getattr(config, name) for name in config.__dataclass_fields__} | {"quantization": quantization}
    path = record(tmp_path / "few_bits.mcap", EngineConfig(**given), submits(2))
    run = read_run(path)
    assert config_of_run(run.hello, {}).quantization == quantization
    assert compare_replay(run).lines[0].startswith("bit-equal: 2 requests, ")
    other = "int4" if quantization != "int4" else "int8"
    assert main(["replay", str(path), "--quantization", other]) == 2
    assert "cannot run the recording again: quantization" in capsys.readouterr().err


def test_different_machine_is_reported_as_a_likely_reason(
    recording: Path, change_weight: Callable[[str], None]
) -> None:
    run = read_run(recording)
    device = replace(run.hello.device, name="another CPU", software="torch 1.0")
    run = RecordedRun(replace(run.hello, device=device), run.requests, run.fingerprints)
    assert compare_replay(run).first == "", "it need not part"
    change_weight("model.layers.2.mlp.up_proj.weight")
    lines = compare_replay(run).lines
    assert lines[1].startswith("a likely reason: the CPU was 'another CPU', and is ")
    assert "the software was 'torch 1.0', and is 'torch " in lines[1]


def test_replay_that_fails_with_an_exception_exits_with_2_and_the_reason(
    recording: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the disk is gone")

    monkeypatch.setattr("kvscope_engine.components.load_model", fail)
    assert main(["replay", str(recording)]) == 2
    assert "could not be run again: RuntimeError: the disk is gone" in capsys.readouterr().err


def test_recording_of_a_service_can_be_replayed(config: EngineConfig, tmp_path: Path) -> None:
    """A service over real sockets has one finished request, one aborted, and one that runs when it is stopped."""
    folder = Path(tempfile.mkdtemp(prefix="kvs-"))
    path, longest = tmp_path / "served.mcap", SamplingParams(max_tokens=4000, ignore_eos=True, temperature=0.7, seed=3)

    def build(progress: Any, publish: Any, messages_dropped: Any) -> Engine:
        given = {name: getattr(config, name) for name in config.__dataclass_fields__}
        given |= {"num_gpu_blocks_override": 1200}
        return Engine(EngineConfig(**given), progress=progress, publish=publish, messages_dropped=messages_dropped)

    with EngineRecorder(path, texts=True) as recorder:
        service = EngineService(f"ipc://{folder}", build, keyless=Role.OPERATOR, recorder=recorder)
        thread = threading.Thread(target=service.run)
        thread.start()
        try:
            with LiveSource(f"ipc://{folder}") as source:
                replies: list[Reply] = []

                def came(kind: type[Reply], name: str) -> bool:
                    nonlocal replies
                    source.update_mirror()
                    replies += source.poll_replies()
                    return any(isinstance(reply, kind) and reply.request_id == name for reply in replies)  # type: ignore[union-attr]

                assert source.wait(lambda: source.update_mirror() is None and source.mirror.hello is not None, 60)
                short = replace(longest, max_tokens=9)
                for name, sampling in (("short", short), ("aborted", longest), ("long", longest)):
                    ids = tuple(range(3, 3 + 10 * len(name)))
                    source.send(Submit(request_id=name, prompt_token_ids=ids, sampling=sampling))
                assert source.wait(lambda: came(Tokens, "aborted"), 60)
                source.send(Abort(request_id="aborted"))
                assert source.wait(lambda: came(Finished, "aborted") and came(Finished, "short"), 60)
                assert source.wait(lambda: came(Tokens, "long"), 60)
                service.stop()
        finally:
            service.stop()
            thread.join(60)
            shutil.rmtree(folder, ignore_errors=True)
    run = read_run(path)
    ends = {text.request.request_id: text.request.finish_reason for text in whole_requests(run)}
    assert ends == {"short": "length", "aborted": "abort", "long": "abort"}
    found = compare_replay(run)
    assert found.lines[0].startswith("bit-equal: 3 requests, ")
    assert found.num_blocks > 10
    assert found.num_logits > 9
