"""Recordings of deterministic engines, run again: bit-equal whatever the schedule, and where not, said where."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from kvscope_engine import Engine, EngineConfig, SamplingParams
from kvscope_engine.cli.main import main
from kvscope_engine.replay import Comparison, RecordedRun, Replayer, config_of_run, read_run
from kvscope_kernels.native.library import library
from kvscope_telemetry.engine_config import SpeculativeConfig
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import Submit
from kvscope_telemetry.messages.telemetry import TelemetryMessage
from kvscope_telemetry.messages.wire import encode
from kvscope_telemetry.recordings.engine_recorder import EngineRecorder
from kvscope_telemetry.recordings.reader import Recording

pytestmark = pytest.mark.skipif(library() is None, reason="no compiler: attention is not the CPU's own")

RUNS: dict[str, dict[str, Any]] = {
    "side by side, in chunks": {"max_num_batched_tokens": 24},
    "with prefixes found": {"max_num_seqs": 2},
    "preempted": {"num_gpu_blocks_override": 44},
}


def submits(count: int) -> list[Submit]:
    """Prompts that begin alike, greedy ones and such with temperature; of one several completions."""
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
    """What `serve --record FILE --record-text` writes."""
    with EngineRecorder(path, texts=texts) as recorder:

        def publish(message: TelemetryMessage) -> None:
            recorder.record(message, encode(message))

        with Engine(config, publish=publish) as engine:
            recorder.give(engine.snapshot())
            recorder.give_requests(engine.take_ended())
            for submit in asked:
                engine.submit(submit)
            while engine.has_unfinished:
                engine.step()
                recorder.give_requests(engine.take_ended())
    return path


def replayed(run: RecordedRun, **options: Any) -> Comparison:
    replayer = Replayer(run)
    with Engine(config_of_run(run.hello, EngineConfig(**options)), publish=replayer.take) as engine:
        return replayer.replay(engine)


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
    """One of each kind."""
    given = {name: getattr(config, name) for name in config.__dataclass_fields__} | RUNS[request.param]
    path = tmp_path_factory.mktemp("run") / "run.mcap"
    return record(path, EngineConfig(**given), submits(7))


def test_the_three_recordings_are_of_what_they_are_called(recording: Path, request: pytest.FixtureRequest) -> None:
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


def test_a_recording_is_bit_equal_when_it_is_run_again(recording: Path) -> None:
    run = read_run(recording)
    found = replayed(run)
    assert found.lines == [f"bit-equal: 8 requests, {found.num_blocks} blocks, 3 layers, {found.num_logits} tokens"]
    texts = [text.token_ids for text in run.requests]
    blocks = {ids[:end] for ids in texts for end in range(4, len(ids), 4)}  # the last token's are never computed
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
def test_so_it_is_on_another_schedule(recording: Path, options: dict[str, Any]) -> None:
    assert replayed(read_run(recording), **options).first == ""


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Changes a byte of a weight once the model was loaded, before it is made ready to run."""
    from kvscope_engine import components

    load = components.load_model

    def change(name: str) -> None:
        def load_changed(*args: Any) -> Any:
            loaded = load(*args)
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
def test_a_changed_byte_of_a_weight_is_found_at_its_layer(
    recording: Path, changed: Callable[[str], None], weight: str, where: str
) -> None:
    run = read_run(recording)
    changed(weight)
    found = replayed(run)
    step = run.fingerprints[0].step
    assert where in found.first
    assert found.lines[0].startswith("the runs part at step ")
    assert "behind" in where or f"at step {step} " in found.first, "it is found where it is first seen"


def test_the_command_says_it_and_has_an_exit_code(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(recording)]) == 0
    assert capsys.readouterr().out.startswith("bit-equal: 8 requests, ")


def test_another_model_parts_or_is_refused(
    recording: Path, tiny_model: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(recording), "--model", tiny_model(num_hidden_layers=3), "--seed", "5"]) == 1
    assert "in layer 0 of 3" in capsys.readouterr().out
    assert main(["replay", str(recording), "--model", tiny_model(num_hidden_layers=4)]) == 2
    assert "num_layers is 4, and was 3" in capsys.readouterr().err


def test_what_a_recording_lacks_is_one_line(tmp_path: Path, config: EngineConfig, model: str) -> None:
    plain = EngineConfig(model=model, device="cpu", dtype="float32", num_gpu_blocks_override=64)
    with pytest.raises(BadInput, match=r"its engine was not deterministic; start the engine with --deterministic"):
        read_run(record(tmp_path / "plain.mcap", plain, submits(1)))
    with pytest.raises(BadInput, match="it holds no texts"):
        read_run(record(tmp_path / "silent.mcap", config, submits(1), texts=False))


def test_without_fingerprints_tokens_are_compared(tmp_path: Path, config: EngineConfig) -> None:
    given = {name: getattr(config, name) for name in config.__dataclass_fields__} | {"fingerprints": False}
    run = read_run(record(tmp_path / "tokens.mcap", EngineConfig(**given), submits(2)))
    assert replayed(run).lines == ["equal tokens: 2 requests; keys and values were not recorded (--fingerprints)"]
    text = run.requests[1]
    other = replace(text, token_ids=(*text.token_ids[:-1], text.token_ids[-1] ^ 1))
    found = replayed(RecordedRun(run.hello, (run.requests[0], other), ()))
    assert found.first == f"in token {len(text.token_ids) - 1} of request 'r1'"
