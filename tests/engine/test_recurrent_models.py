"""Engines on tiny models with recurrent layers: tokens equal transformers, whatever else runs."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.recurrent_models import FAMILIES, SIZES, recurrent_config, sampled

from kvscope_engine import Engine, EngineConfig, SamplingParams
from kvscope_engine.model.hf_config import read_config
from kvscope_engine.model.layers.forward import Forward
from kvscope_engine.model.loader.model_loader import random_model
from kvscope_engine.policy.scheduling.scheduler import Scheduler
from kvscope_engine.policy.step_plan import StepPlan
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import Finished, Submit, Tokens
from kvscope_telemetry.messages.request_state import RequestState

Make = Callable[..., Engine]
MANY = ("qwen3_next", "granitemoehybrid", "lfm2", "jamba", "mamba2", "rwkv")
SIMILAR = ("granitemoehybrid", "lfm2", "jamba", "mamba2")
"""Families whose states are kept by the same code as those of `qwen3_next`."""
"""One model family for each kind of layer."""


def write_config(family: str, folder: Path, **changes: Any) -> Path:
    config = recurrent_config(family, **changes)
    path = folder / f"{family}.json"
    path.write_text(json.dumps(config.to_dict() | {"architectures": None}, default=str))
    return path


@pytest.fixture
def make_engine_of_family(tmp_path: Path) -> Iterator[Make]:
    """Function that makes engines on tiny random models: `make_engine_of_family(family, **options)`."""
    engines: list[Engine] = []

    def engine_on(family: str, changes: dict[str, Any] | None = None, **options: Any) -> Engine:
        path = write_config(family, tmp_path, **(changes or {}))
        small = {"block_size": 8, "num_gpu_blocks_override": 96, "max_num_batched_tokens": 24, "max_num_seqs": 4}
        others = {"model": f"dummy:{path}", "dtype": "float32", "device": "cpu", "max_model_len": 512}
        engines.append(Engine(EngineConfig(**(others | small | {"state_interval": 16} | options))))
        return engines[-1]

    yield engine_on
    for engine in engines:
        engine.close()


def prompt_of(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, 96), k=length)


def submit_of(name: str, ids: Sequence[int], max_tokens: int = 8, **options: Any) -> Submit:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)
    return Submit(request_id=name, prompt_token_ids=tuple(ids), sampling=sampling)


def complete_all(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int = 8) -> list[list[int]]:
    submits = [submit_of(f"{number}", ids, max_tokens) for number, ids in enumerate(prompts)]
    return [list(completion.token_ids) for completion in engine.generate(submits)]


def transformers_tokens(
    folder: Path, family: str, prompts: Sequence[Sequence[int]], max_tokens: int = 8
) -> list[list[int]]:
    config = read_config(folder / f"{family}.json")
    model: Any = random_model(config, torch.float32, torch.device("cpu"), 0, lambda _: None).eval()
    return [greedy(model, ids, max_tokens) for ids in prompts]


@torch.inference_mode()
def greedy(model: Any, ids: Sequence[int], max_tokens: int) -> list[int]:
    answer = model.generate(torch.tensor([list(ids)]), max_new_tokens=max_tokens, do_sample=False, eos_token_id=None)
    found: list[int] = answer[0, len(ids) :].tolist()
    return found


def scheduler_of(engine: Engine) -> Scheduler:
    return engine.components.scheduler


def check_all_released(engine: Engine) -> None:
    """Check that no request has a slot once nothing runs."""
    scheduler = scheduler_of(engine)
    scheduler.check_integrity()
    states = scheduler.states
    assert states is not None
    assert states.num_free + states.num_checkpoints == states.num_slots
    assert states.num_free_host + states.num_host_checkpoints == states.num_host_slots


@pytest.mark.parametrize("family", sampled())
def test_tokens_of_recurrent_models_equal_transformers(
    family: str, make_engine_of_family: Make, tmp_path: Path
) -> None:
    """Prompts run in chunks, several at once, one with the prefix of another; and again, found in the cache."""
    prompts = [prompt_of(1, 50), prompt_of(2, 9), prompt_of(3, 1), prompt_of(1, 37) + prompt_of(4, 20)]
    engine = make_engine_of_family(family, state_checkpoints=20)
    wanted = transformers_tokens(tmp_path, family, prompts)
    assert complete_all(engine, prompts) == wanted
    check_all_released(engine)
    before = scheduler_of(engine).totals.cached_tokens
    assert complete_all(engine, prompts) == wanted
    assert scheduler_of(engine).totals.cached_tokens - before == 48 + 8 + 0 + 56, (
        "not the full blocks of each prompt were cached"
    )
    check_all_released(engine)


def test_text_part_of_a_vision_model_gives_the_tokens_of_the_whole_model(
    make_engine_of_family: Make, tmp_path: Path
) -> None:
    """Qwen3.5 as it is published: its text part has the recurrent layers."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 32}
    text = SIZES | FAMILIES["qwen3_5_text"]
    config = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=vision | {"num_position_embeddings": 16})
    torch.manual_seed(0)
    auto: Any = AutoModelForImageTextToText
    whole = auto.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    whole.save_pretrained(tmp_path / "whole")
    prompts = [prompt_of(1, 50), prompt_of(2, 9)]
    engine = make_engine_of_family("qwen3_5_text", model=str(tmp_path / "whole"))
    assert complete_all(engine, prompts) == [greedy(whole, ids, 8) for ids in prompts]


@pytest.mark.storm(*({"family": family} for family in SIMILAR))
@pytest.mark.parametrize("family", MANY)
def test_preempted_requests_give_the_same_tokens(family: str, make_engine_of_family: Make) -> None:
    prompts = [prompt_of(seed, 30) for seed in range(4)]
    wanted = complete_all(make_engine_of_family(family), prompts, 40)
    engine = make_engine_of_family(family, num_gpu_blocks_override=17)
    assert complete_all(engine, prompts, 40) == wanted
    assert scheduler_of(engine).totals.preemptions > 0
    check_all_released(engine)


@pytest.mark.storm({"disk": 0})
@pytest.mark.parametrize("family", [*MANY, "mamba"])
@pytest.mark.parametrize("disk", [0, 1 << 20])
def test_swapped_requests_give_the_tokens_of_transformers(
    family: str, disk: int, make_engine_of_family: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each third step one request goes to host memory with its state, and comes back without recomputing
    anything.
    """
    monkeypatch.setenv("KVSCOPE_CACHE", str(tmp_path))
    prompts = [prompt_of(seed, 30) for seed in range(4)]
    engine = make_engine_of_family(family, host_kv_memory_bytes=1 << 22, disk_kv_memory_bytes=disk, preemption="swap")
    wanted = transformers_tokens(tmp_path, family, prompts, 20)
    scheduler = scheduler_of(engine)
    for number, ids in enumerate(prompts):
        engine.submit(submit_of(f"{number}", ids, 20))
    requests, chance = list(scheduler.requests.values()), random.Random(1)
    while engine.has_unfinished:
        engine.step(ahead=False)
        running = [each for each in requests if each.state is RequestState.RUNNING and each.num_computed_tokens]
        if running and chance.random() < 0.4:
            assert scheduler.preempt(chance.choice(running), "swap", "a test", 0) is not None
        scheduler.check_integrity()
    assert [each.output_token_ids for each in requests] == wanted
    states, totals = scheduler.states, scheduler.totals
    assert states is not None
    assert states.num_loaded >= states.num_swapped > 5
    assert (totals.recomputed_tokens, totals.lost_blocks) == (0, 0)
    check_all_released(engine)


SHORTAGE = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
OF_LIBRARY = RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`")


@pytest.mark.storm({"error": OF_LIBRARY})
@pytest.mark.storm(*({"family": family} for family in SIMILAR))
@pytest.mark.parametrize("error", [SHORTAGE, OF_LIBRARY], ids=["memory", "library"])
@pytest.mark.parametrize("family", MANY)
def test_steps_that_fail_after_changing_states_lose_no_request_and_no_token(
    family: str, error: Exception, make_engine_of_family: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some steps fail after their layers ran; requests restart from complete states."""
    prompts = [prompt_of(seed, 50) for seed in range(6)]
    calm = make_engine_of_family(family)
    expected = complete_all(calm, prompts, 30)
    engine = make_engine_of_family(family, host_kv_memory_bytes=1 << 22, preemption="swap")
    fails_at, num_calls = {1, 7, 8, 40, 41, 80}, 0

    def failing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal num_calls
            result = function(*args, **kwargs)
            num_calls += 1
            if num_calls in fails_at:
                raise error
            return result

        return call

    monkeypatch.setattr(Forward, "logits", failing(Forward.logits))
    monkeypatch.setattr(Forward, "fill", failing(Forward.fill))
    assert complete_all(engine, prompts, 30) == expected
    assert num_calls > max(fails_at)
    check_all_released(engine)
    why = "a step failed" if error is OF_LIBRARY else "a step ran out of memory"
    assert any(note.startswith(f"{why}: steps have up to 12 tokens") for note in engine.notes), engine.notes


def test_request_that_makes_a_library_fail_ends_without_harm_to_others(
    make_engine_of_family: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [prompt_of(seed, 20) for seed in range(4)]
    expected = complete_all(make_engine_of_family("qwen3_next"), prompts)
    engine = make_engine_of_family("qwen3_next", enable_prefix_caching=False)
    launch = engine.components.runner.launch

    def picky(plan: StepPlan, after: Any = None) -> Any:
        launched = launch(plan, after)
        if any(item.request.number == 2 and item.start + item.num_tokens > 9 for item in plan.scheduled):
            raise OF_LIBRARY
        return launched

    monkeypatch.setattr(engine.components.runner, "launch", picky)
    said = complete_all(engine, prompts)
    assert said[1] == []
    assert [said[0], *said[2:]] == [expected[0], *expected[2:]]
    check_all_released(engine)


def test_saved_states_are_loaded_from_host_memory(make_engine_of_family: Make, tmp_path: Path) -> None:
    """Their evicted blocks are loaded with them."""
    options: dict[str, Any] = {"state_checkpoints": 0, "max_num_seqs": 1, "num_gpu_blocks_override": 12}
    engine = make_engine_of_family("qwen3_next", state_interval=512, host_kv_memory_bytes=1 << 22, **options)
    prompts = [prompt_of(seed, 40) for seed in range(4)]
    assert any("in host memory 1 states" in note for note in engine.notes), "as many as run, and none for prefixes"
    engine.close()
    engine = make_engine_of_family(
        "qwen3_next", state_interval=512, host_kv_memory_bytes=1 << 22, **options | {"state_checkpoints": 4}
    )
    states, totals = scheduler_of(engine).states, scheduler_of(engine).totals
    assert states is not None
    found = []
    for ids in prompts * 2:
        before = totals.cached_tokens
        complete_all(engine, [ids])
        found.append(totals.cached_tokens - before)
    assert found == [0] * 4 + [32] * 4
    assert totals.loaded_blocks > 0
    check_all_released(engine)


def test_kept_disk_file_without_states_gives_no_hits(make_engine_of_family: Make, tmp_path: Path) -> None:
    """A later start finds nothing in the file and reports it."""
    disk = {"disk_kv_memory_bytes": 1 << 20, "disk_kv_path": str(tmp_path / "kv"), "keep_disk_kv": True}
    said = []
    for _ in range(2):
        engine = make_engine_of_family(
            "qwen3_next", host_kv_memory_bytes=1 << 18, num_gpu_blocks_override=12, max_num_seqs=1, **disk
        )
        said.append(complete_all(engine, [prompt_of(seed, 40) for seed in range(4)]))
        assert any("a later start cannot use the kept file" in note for note in engine.notes)
        assert scheduler_of(engine).totals.cached_tokens == 0
        check_all_released(engine)
        engine.close()
    assert said[0] == said[1]


def test_too_little_host_memory_for_a_state_is_reported(make_engine_of_family: Make) -> None:
    engine = make_engine_of_family("qwen3_next", host_kv_memory_bytes=6000)
    assert any("--kv-host-memory is too small for a state of" in note for note in engine.notes)
    [wanted] = complete_all(engine, [prompt_of(1, 30)], 12)
    engine.submit(submit_of("again", prompt_of(1, 30), 12))
    [request] = scheduler_of(engine).requests.values()
    for _ in range(4):
        engine.step(ahead=False)
    assert scheduler_of(engine).preempt(request, "swap", "a test", 0) is None
    assert scheduler_of(engine).preempt(request, "", "a test", 0) is not None
    while engine.has_unfinished:
        engine.step(ahead=False)
    assert request.output_token_ids == wanted
    check_all_released(engine)


@pytest.mark.storm({"caching": False})
@pytest.mark.parametrize("family", MANY)
@pytest.mark.parametrize("caching", [True, False])
def test_completions_of_one_prompt_on_a_recurrent_model_give_the_tokens_of_a_single_one(
    family: str, caching: bool, make_engine_of_family: Make
) -> None:
    engine = make_engine_of_family(family, enable_prefix_caching=caching)
    ids = prompt_of(7, 41)
    [wanted] = complete_all(engine, [ids])
    engine.submit(submit_of("three", ids, n=3))
    said: list[Tokens | Finished] = []
    while engine.has_unfinished:
        said += engine.step()
        scheduler_of(engine).check_integrity()
    for index in range(3):
        pieces = [message for message in said if isinstance(message, Tokens) and message.index == index]
        assert [token for piece in pieces for token in piece.token_ids] == wanted
    check_all_released(engine)


def test_aborted_requests_free_their_states(make_engine_of_family: Make) -> None:
    engine, chance = make_engine_of_family("bamba"), random.Random(3)
    for number in range(12):
        engine.submit(submit_of(f"{number}", prompt_of(number % 3, 20 + number), 20))
    for number in chance.sample(range(12), 12):
        for _ in range(chance.randint(0, 2)):
            engine.step()
            scheduler_of(engine).check_integrity()
        engine.abort(f"{number}")
    while engine.has_unfinished:
        engine.step()
    check_all_released(engine)


def test_third_prompt_continues_where_two_others_parted(make_engine_of_family: Make) -> None:
    """The second prompt finds blocks but no state at that place, and saves one."""
    engine = make_engine_of_family("qwen3_next", state_interval=512)
    totals = scheduler_of(engine).totals
    shared = prompt_of(1, 100)
    for number in range(3):
        before = totals.cached_tokens
        complete_all(engine, [shared + prompt_of(10 + number, 30)])
        assert totals.cached_tokens - before == (0, 0, 96)[number]
    check_all_released(engine)


def test_engine_with_few_state_slots_keeps_the_most_recently_used_states(make_engine_of_family: Make) -> None:
    engine = make_engine_of_family("qwen3_next", state_checkpoints=1, max_num_seqs=1, state_interval=512)
    totals, states = scheduler_of(engine).totals, scheduler_of(engine).states
    assert states is not None
    assert states.num_slots == 3
    first, second, third = (prompt_of(seed, 40) for seed in range(3))
    found = []
    for ids in (first, second, first, third, first, second):
        before = totals.cached_tokens
        complete_all(engine, [ids])
        found.append(totals.cached_tokens - before)
    assert found == [0, 0, 32, 0, 32, 0], "not two states are kept while no request runs"
    assert states.num_evicted > 0
    check_all_released(engine)


def test_reset_prefix_cache_drops_the_states(make_engine_of_family: Make) -> None:
    engine = make_engine_of_family("lfm2")
    complete_all(engine, [prompt_of(1, 50)])
    states = scheduler_of(engine).states
    assert states is not None
    assert states.num_checkpoints
    engine.reset_prefix_cache()
    assert not states.num_checkpoints
    check_all_released(engine)


def test_known_prefix_gives_the_first_token_ten_times_sooner(make_engine_of_family: Make) -> None:
    sizes = {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1536}
    layers = {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2}
    options: dict[str, Any] = {"max_num_batched_tokens": 512, "num_gpu_blocks_override": 512, "max_model_len": 2048}
    engine = make_engine_of_family("qwen3_5_text", sizes | layers, state_interval=512, **options)
    prefix = prompt_of(1, 1500)

    def seconds_to_first_token(number: int) -> float:
        """Return CPU seconds, because other processes share the machine."""
        engine.submit(submit_of(f"{number}", prefix + prompt_of(10 + number, 8), 1))
        started = time.process_time()
        while engine.has_unfinished:
            engine.step()
        return time.process_time() - started

    alone, parted = seconds_to_first_token(1), seconds_to_first_token(2)
    known = min(seconds_to_first_token(number) for number in (3, 4, 5))
    assert known < alone / 10, f"{known * 1000:.0f} ms after {alone * 1000:.0f}"
    assert parted < alone / 2, "no state is saved every 512 tokens"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"allocator": "contiguous"}, "allocator='contiguous'"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2"),
        ({"speculative_config": "ngram"}, "speculative_config"),
    ],
)
def test_options_that_do_not_support_states_are_refused_by_name(
    make_engine_of_family: Make, options: dict[str, Any], reason: str
) -> None:
    if "speculative_config" in options:
        from kvscope_telemetry.engine_config import SpeculativeConfig

        options = {"speculative_config": SpeculativeConfig(num_speculative_tokens=2)}
    with pytest.raises(BadInput, match=rf"{reason}.* is not accepted .* has recurrent layers"):
        make_engine_of_family("qwen3_next", **options)


def test_recurrent_states_get_half_of_the_kv_memory_and_limit_running_requests(make_engine_of_family: Make) -> None:
    """Fewer requests run at once where that is not enough."""
    slot = 2 * 4 * (64 * 4 + 4 * 8 * 8)
    engine = make_engine_of_family(
        "qwen3_next", kv_memory_bytes=12 * slot, num_gpu_blocks_override=None, max_num_seqs=64
    )
    assert engine.components.states is not None
    assert engine.components.states.num_slots == 6
    assert engine.components.storage.num_bytes <= 6 * slot
    assert any("at most 5 requests run at the same time" in note for note in engine.notes)
    prompts = [prompt_of(seed, 10) for seed in range(3)]
    assert complete_all(engine, prompts, 2) == complete_all(make_engine_of_family("qwen3_next"), prompts, 2)
