"""LoRA adapters of an engine: which blocks belong to which adapter, what is reported, and loading at run time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.lora_folder import write_adapter, write_files

from kvscope_engine import Engine
from kvscope_telemetry.engine_config import LoraModule
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.commands import Finished, Submit, Tokens
from kvscope_telemetry.messages.event_kinds import cause_text
from kvscope_telemetry.messages.request_state import WaitsFor
from kvscope_telemetry.messages.sampling_params import SamplingParams
from kvscope_telemetry.messages.telemetry import Event, Frame
from kvscope_telemetry.mirror.coalesce import coalesce
from kvscope_telemetry.mirror.mirror import Mirror

MakeEngine = Callable[..., Engine]
PROMPT = tuple(range(3, 43))


@pytest.fixture(scope="module")
def adapter_folders(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., str]) -> Path:
    """Folder with adapters a, b and one for another model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    path = tmp_path_factory.mktemp("adapters")
    config: Any = AutoConfig.from_pretrained(tiny_model().removeprefix("dummy:"))
    model = auto.from_config(config)
    write_adapter(path / "a", model, seed=1)
    write_adapter(path / "b", model, seed=2)
    config.hidden_size = 32
    write_adapter(path / "other", auto.from_config(config))
    return path


def lora_modules(adapter_folders: Path, *names: str) -> tuple[LoraModule, ...]:
    return tuple(LoraModule(name=name, path=str(adapter_folders / name)) for name in names)


def make_submit(adapter: str, request_id: str = "-", max_tokens: int = 4, **fields: Any) -> Submit:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return Submit(request_id=request_id, prompt_token_ids=PROMPT, sampling=sampling, adapter=adapter, **fields)


def run(engine: Engine, adapter: str, **fields: Any) -> tuple[tuple[int, ...], int]:
    """Return the tokens, and how many prompt tokens were cached."""
    (one,) = engine.generate([make_submit(adapter, **fields)])
    return tuple(one.token_ids), one.usage.cached_tokens


def events_in(told: list[Any]) -> list[Event]:
    """Return the events of all frames."""
    return [event for message in told if isinstance(message, Frame) for event in message.events]


def test_cached_blocks_are_found_only_by_requests_for_the_same_adapter(
    make_engine: MakeEngine, adapter_folders: Path
) -> None:
    engine = make_engine(lora_modules=lora_modules(adapter_folders, "a", "b"))
    firsts = {name: run(engine, name) for name in ("", "a", "b")}
    assert [cached for _, cached in firsts.values()] == [0, 0, 0]
    assert len({tokens for tokens, _ in firsts.values()}) == 3
    for name, (tokens, _) in firsts.items():
        assert run(engine, name) == (tokens, 36)
    assert run(engine, "a", cache_salt="mine")[1] == 0


def test_reason_for_a_cache_miss_names_the_other_adapter(make_engine: MakeEngine, adapter_folders: Path) -> None:
    told: list[Any] = []
    engine = make_engine(lora_modules=lora_modules(adapter_folders, "a", "b"), publish=told.append)
    for adapter, salt in (("a", ""), ("b", ""), ("b", "mine"), ("b", "mine")):
        run(engine, adapter, cache_salt=salt)
    causes = [cause_text(event) for event in events_in(told) if event.kind == "admitted"]
    assert "no cached prefix matches" in causes[0]
    assert "its text is cached under another LoRA adapter" in causes[1]
    assert "its text is cached under another cache salt" in causes[2]
    assert "not more, since" not in causes[3]


def test_block_text_names_its_adapter_and_salt(make_engine: MakeEngine, adapter_folders: Path) -> None:
    engine = make_engine(lora_modules=lora_modules(adapter_folders, "a", "b"))
    run(engine, "a", cache_salt="mine")
    engine.submit(make_submit("b", "open"))
    engine.step()
    ledger = engine.components.pool.ledger
    notes = [content.notes for content in engine.block_text(range(len(ledger.filled))) if content.token_ids]
    assert set(notes) == {(("LoRA", "a"), ("Cache salt", "mine")), (("LoRA", "a"),), (("LoRA", "b"),)}


def test_replaced_adapter_of_the_same_name_does_not_hit_old_blocks(
    make_engine: MakeEngine, adapter_folders: Path
) -> None:
    told: list[Any] = []
    engine = make_engine(
        lora_modules=lora_modules(adapter_folders, "a"), allow_runtime_lora_updating=True, publish=told.append
    )
    old, _ = run(engine, "a")
    new_engine = make_engine(lora_modules=lora_modules(adapter_folders, "b"))
    new, _ = run(new_engine, "b")
    does = engine.interventions
    assert does.unload_adapter("a", "me") == "LoRA adapter 'a' was unloaded"
    assert does.load_adapter("a", str(adapter_folders / "b"), "me").startswith("LoRA adapter 'a' was loaded from")
    assert run(engine, "a") == (new, 0)
    assert new != old
    does.unload_adapter("a", "me")
    does.load_adapter("a", str(adapter_folders / "a"), "me")
    assert run(engine, "a") == (old, 36), "the same weights under the same name were not found"
    notes = [event.cause for event in events_in(told) if event.kind == "note"]
    assert notes.count("LoRA adapter 'a' was unloaded by me") == 2


def test_kept_disk_tier_finds_blocks_by_adapter_weights(
    make_engine: MakeEngine, adapter_folders: Path, tmp_path: Path, tiny_model: Callable[..., str]
) -> None:
    """At the next start under the same name, the same weights find their blocks and other weights none."""
    kept = {
        "model": tiny_model(),
        "host_kv_memory_bytes": 1 << 20,
        "disk_kv_memory_bytes": 1 << 20,
        "disk_kv_path": str(tmp_path / "kv"),
        "keep_disk_kv": True,
    }
    first = make_engine(lora_modules=lora_modules(adapter_folders, "a"), **kept)
    expected, _ = run(first, "a", cache_salt="mine")
    first.close()
    other = make_engine(lora_modules=(LoraModule(name="a", path=str(adapter_folders / "b")),), **kept)
    assert run(other, "a", cache_salt="mine")[1] == 0
    other.close()
    again = make_engine(lora_modules=lora_modules(adapter_folders, "a"), **kept)
    rows = range(len(again.components.pool.ledger.filled))
    notes = {content.notes for content in again.block_text(rows) if content.token_ids}
    assert (("LoRA", "a"), ("Cache salt", "mine")) in notes
    tokens, num_cached = run(again, "a", cache_salt="mine")
    assert (tokens, num_cached > 0) == (expected, True)


def test_running_requests_continue_after_their_adapter_is_unloaded(
    make_engine: MakeEngine, adapter_folders: Path
) -> None:
    expected, _ = run(make_engine(lora_modules=lora_modules(adapter_folders, "a")), "a", max_tokens=12)
    engine = make_engine(lora_modules=lora_modules(adapter_folders, "a"), allow_runtime_lora_updating=True, max_loras=1)
    for request_id in ("runs", "waits"):
        engine.submit(make_submit("a", request_id, max_tokens=12))
    engine.submit(make_submit("", "alone"))
    said = engine.step()
    assert engine.interventions.unload_adapter("a", "me").endswith("; 2 requests that have it go on")
    with pytest.raises(BadInput, match="LoRA adapter 'a' is not loaded: none here"):
        engine.submit(make_submit("a", "late"))
    engine.interventions.load_adapter(
        "b", str(adapter_folders / "b"), "me"
    )  # takes the only slot after they have finished
    engine.submit(make_submit("b", "other"))
    while engine.has_unfinished:
        said += engine.step()
    tokens = {
        name: tuple(
            token for one in said if isinstance(one, Tokens) and one.request_id == name for token in one.token_ids
        )
        for name in ("runs", "waits")
    }
    assert tokens == {"runs": expected, "waits": expected}
    assert sum(isinstance(one, Finished) for one in said) == 4
    engine.while_idle()
    assert engine.components.lora is not None
    assert [one.name for one in engine.components.lora.loaded] == ["b"]


def test_more_adapters_than_slots_share_the_slots(make_engine: MakeEngine, adapter_folders: Path) -> None:
    """Each gets a slot again and again, and a request that waits for one is not overtaken."""
    alone = {
        name: run(make_engine(lora_modules=lora_modules(adapter_folders, "a", "b")), name)[0] for name in ("", "a", "b")
    }
    engine = make_engine(lora_modules=lora_modules(adapter_folders, "a", "b"), max_loras=1, enable_prefix_caching=False)
    order = ["a", "b", "", "a", "b", "b", "a", ""]
    submits = [make_submit(name, f"r{number}") for number, name in enumerate(order)]
    assert [tuple(one.token_ids) for one in engine.generate(submits)] == [alone[name] for name in order]


def test_request_reports_its_adapter_and_that_it_waits_for_it(make_engine: MakeEngine, adapter_folders: Path) -> None:
    engine = make_engine(lora_modules=lora_modules(adapter_folders, "a", "b"), max_loras=1)
    mirror = Mirror()
    for name in ("a", "b", ""):
        engine.submit(make_submit(name, f"r-{name}"))
    engine.step()
    mirror.apply(coalesce((), snapshot=engine.snapshot()))
    assert mirror.requests.adapters == ["a", "b", ""]
    waits = [int(value) for value in mirror.requests.waits_for]
    assert waits == [WaitsFor.UNKNOWN, WaitsFor.ADAPTER, WaitsFor.UNKNOWN]
    while engine.has_unfinished:
        engine.step()
    assert not any(request.waits_for for request in engine.components.scheduler.requests.values())


def test_memory_report_has_a_part_for_adapters(make_engine: MakeEngine, adapter_folders: Path) -> None:
    plain = make_engine().memory()
    engine = make_engine(lora_modules=lora_modules(adapter_folders, "a"), max_loras=2, max_lora_rank=8)
    memory = engine.memory()
    parts = {part.name: part.num_bytes for part in memory.modules}
    hidden, between, keys = 64, 128, 32
    inputs, outputs = 3 * hidden + hidden + 2 * hidden + between, hidden + 2 * keys + hidden + 2 * between + hidden
    assert parts.pop("LoRA adapters") == 2 * 8 * 4 * 2 * (inputs + outputs)  # slots, rank, bytes, layers
    assert parts == {part.name: part.num_bytes for part in plain.modules}
    assert memory.weights_bytes == sum(part.num_bytes for part in memory.modules)
    work = [one.components.work for one in (make_engine(), engine)]
    assert work[0] == work[1], "adapters changed the least work of a step"


def test_adapter_of_another_model_is_refused_by_name(
    make_engine: MakeEngine, adapter_folders: Path, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=r"down_proj' is for 128 inputs and 32 outputs, this model's has 128 and 64"):
        make_engine(lora_modules=lora_modules(adapter_folders, "other"))
    for layer in ("lm_head", "model.layers.7.mlp.up_proj", "model.embed_tokens"):
        stem = f"base_model.model.{layer}.lora_"
        tensors = {f"{stem}A.weight": torch.zeros(2, 64), f"{stem}B.weight": torch.zeros(64, 2)}
        write_files(tmp_path, tensors, {"r": 2, "lora_alpha": 2})
        with pytest.raises(BadInput) as refusal:
            make_engine(lora_modules=(LoraModule(name="sql", path=str(tmp_path)),))
        names = "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
        assert f"'{layer}' is no linear layer of this model that adapters are for: {names}" in str(refusal.value)


def test_impossible_adapter_commands_are_refused_with_the_reason(
    make_engine: MakeEngine, adapter_folders: Path
) -> None:
    plain = make_engine()
    with pytest.raises(BadInput, match="LoRA adapter 'a' is not accepted: this engine was started without any"):
        plain.submit(make_submit("a"))
    fixed = make_engine(lora_modules=lora_modules(adapter_folders, "a"))
    for engine in (plain, fixed):
        assert not engine.interventions.can_update_adapters
        with pytest.raises(BadInput, match="started with --allow-runtime-lora-updating"):
            engine.interventions.load_adapter("b", str(adapter_folders / "b"), "me")
        with pytest.raises(BadInput, match="started with --allow-runtime-lora-updating"):
            engine.interventions.unload_adapter("a", "me")
    free = make_engine(allow_runtime_lora_updating=True)
    free.interventions.load_adapter("a", str(adapter_folders / "a"), "me")
    for name, path, says in (
        ("a", "a", "'a' is loaded already: unload it first"),
        (free.hello.model.name, "a", "the model is called so"),
        ("c", "none", "there is no such folder"),
        ("d", "other", "this model's has 128 and 64"),
    ):
        with pytest.raises(BadInput, match=says):
            free.interventions.load_adapter(name, str(adapter_folders / path), "me")
    with pytest.raises(BadInput, match="'d' is not loaded: a here"):
        free.interventions.unload_adapter("d", "me")
    assert [one.name for one in free.interventions.adapters] == ["a"]
    with pytest.raises(BadInput, match="lora_modules: name 'a' is given twice"):
        make_engine(lora_modules=lora_modules(adapter_folders, "a", "a"))
