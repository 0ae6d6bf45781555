"""The order of steps at start, and that options and threads reach the components that need them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvscope_engine import Engine, EngineConfig, components
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import Finished, Submit
from kvscope_telemetry.messages.sampling_params import SamplingParams


def engine_config(model: str, **options: Any) -> EngineConfig:
    return EngineConfig(model=model, device="cpu", dtype="float32", kv_memory_bytes=4 << 20, **options)


def run_a_few_steps(engine: Engine) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    assert len(list(engine.generate([Submit(request_id="-", prompt_token_ids=(5, 6, 7), sampling=sampling)]))) == 1


def test_blocks_are_counted_after_fusing_and_the_runner_is_built_last(
    tiny_model: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fusing frees memory for blocks, and a step is measured with the model as it runs."""
    order: list[str] = []

    def noted(name: str, is_ready: Callable[..., bool] = lambda *_: True) -> None:
        original = getattr(components, name)

        def call(*args: Any, **options: Any) -> Any:
            assert is_ready(*args), f"{name} comes too early"
            order.append(name)
            return original(*args, **options)

        monkeypatch.setattr(components, name, call)

    def is_joined(_: EngineConfig, loaded: Any) -> bool:
        return getattr(loaded.module, "kvscope_fused_model", None) is not None

    noted("load_model")
    noted("_fingerprint", lambda engine_config, loaded: not is_joined(engine_config, loaded))
    noted("make_ready_to_run")
    noted("pool_size", is_joined)
    noted("storage_for_model")
    noted("ModelRunner")
    Engine(engine_config(tiny_model())).close()
    assert order == [
        "load_model",
        "_fingerprint",
        "make_ready_to_run",
        "pool_size",
        "storage_for_model",
        "ModelRunner",
    ]


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_enforce_eager_reaches_the_runner(
    tiny_model: Callable[..., str], monkeypatch: pytest.MonkeyPatch, enforce_eager: bool
) -> None:
    asked: list[bool] = []
    original: Any = components.ModelRunner

    def runner(loaded: Any, storage: Any, runner_config: Any, **options: Any) -> Any:
        asked.append(runner_config.enforce_eager)
        return original(loaded, storage, runner_config, **options)

    monkeypatch.setattr(components, "ModelRunner", runner)
    Engine(engine_config(tiny_model(), enforce_eager=enforce_eager)).close()
    assert asked == [enforce_eager]


class FakeThreads:
    """Counts its calls."""

    made: list[FakeThreads]
    is_reduced = False

    def __init__(self, num_threads: int | None) -> None:
        self.num_threads = num_threads
        self.num_checks = 0
        self.is_closed = False
        self.made.append(self)

    def refresh(self) -> None:
        self.num_checks += 1

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("num_threads", [None, 1])
def test_threads_are_checked_during_the_start_and_after_every_step(
    tiny_model: Callable[..., str], monkeypatch: pytest.MonkeyPatch, num_threads: int | None
) -> None:
    """`CpuThreads` decides how many of the threads to give up."""
    FakeThreads.made = []
    monkeypatch.setattr(components, "CpuThreads", FakeThreads)
    with Engine(engine_config(tiny_model(), num_threads=num_threads)) as engine:
        (threads,) = FakeThreads.made
        assert (num_at_start := threads.num_checks) > 0
        run_a_few_steps(engine)
        assert threads.num_checks - num_at_start == engine.step_count > 1
    assert threads.num_threads == num_threads
    assert threads.is_closed


def test_step_without_memory_ends_only_its_own_requests(
    tiny_model: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that come later are served."""
    with Engine(engine_config(tiny_model())) as engine:
        runner, failures = engine.components.runner, [torch.OutOfMemoryError("out of memory")] * 30
        run = runner.run
        monkeypatch.setattr(runner, "run", lambda plan: run(plan) if not failures else _raise(failures.pop()))
        sampling = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
        submit = Submit(request_id="-", prompt_token_ids=(5, 6, 7), sampling=sampling)
        engine.submit(submit)
        said = [message for _ in range(4) for message in engine.step()]
        (last,) = [message for message in said if isinstance(message, Finished)]
        assert (last.finish_reason, engine.has_unfinished) == ("error", False)
        assert "no memory for a step of 1 token" in last.error
        failures.clear()
        (served,) = engine.generate([submit])
        assert len(served.token_ids) == 3


def _raise(error: Exception) -> Any:
    raise error


def test_reported_longest_request_is_the_limit_of_submit(tiny_model: Callable[..., str]) -> None:
    """The number with which `submit` refuses, so that a display of the context length means the same."""

    def submit(engine: Engine, num_prompt_tokens: int) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        prompt = tuple(5 + place % 9 for place in range(num_prompt_tokens))
        engine.submit(Submit(request_id=f"{num_prompt_tokens}", prompt_token_ids=prompt, sampling=sampling))

    # With the model's length, the output is shortened to the remaining length.
    for num_blocks, expected, refused in ((6, 96, 93), (1000, 512, 512)):
        engine = Engine(engine_config(tiny_model(), num_gpu_blocks_override=num_blocks))
        try:
            assert engine.hello.cache.max_request_tokens == expected
            submit(engine, refused - 1)
            with pytest.raises(BadInput, match=str(expected)):
                submit(engine, refused)
        finally:
            engine.close()


def test_cpu_engines_do_not_wait_for_each_other_and_leave_no_file(
    tiny_model: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    with Engine(engine_config(tiny_model())) as engine, Engine(engine_config(tiny_model())) as beside:
        assert engine.components.guard is None
        run_a_few_steps(engine)
        run_a_few_steps(beside)
        assert not (tmp_path / "runtime").exists()
