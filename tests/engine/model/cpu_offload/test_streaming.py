"""Layers streamed from host memory compute the same as layers on the device, whatever is interrupted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.lora_folder import write_adapter

from kvscope_engine import Engine, EngineConfig, components
from kvscope_engine.model.cpu_offload import streaming
from kvscope_engine.model.cpu_offload.split import large_tensors
from kvscope_engine.model.cpu_offload.streaming import close_streaming, streamed_weights
from kvscope_engine.model.device_memory.host_slab import HostSlab
from kvscope_engine.model.layers.weight_bytes import weights_by_part, weights_bytes
from kvscope_engine.model.verification.ready_to_run import make_ready_to_run
from kvscope_engine.roofline.model_costs import model_work
from kvscope_telemetry.engine_config import LoraModule
from kvscope_telemetry.errors import BadInput, KvscopeError
from kvscope_telemetry.messages.commands import Submit
from kvscope_telemetry.messages.sampling_params import SamplingParams
from kvscope_telemetry.messages.telemetry import Frame, TelemetryMessage

Load = Callable[..., Any]
PROMPTS = ((5, 6, 7, 8, 9, 11, 13), (20, 21, 22))
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 6},
    "qwen3": {"num_hidden_layers": 5},
    "gpt_oss": {"num_hidden_layers": 4},
    "youtu": {"num_hidden_layers": 4},
}


def tokens_of(planned: Any, loaded: Any) -> tuple[Any, Any]:
    run = planned(loaded)
    for prompt in PROMPTS:
        run.add(prompt, 6, logprobs=2)
    return run.run(max_chunk=3), run.logprobs


@pytest.mark.parametrize(
    ("model_type", "num_layers"), [("llama", 3), ("llama", 4), ("llama", 6), ("qwen3", 3), ("gpt_oss", 3), ("youtu", 3)]
)
def test_streamed_layers_give_the_same_tokens(
    load_on_host: Load, planned: Any, late_copies: Any, model_type: str, num_layers: int
) -> None:
    whole, split = load_on_host(model_type, num_layers, **ARCHITECTURES[model_type])
    assert tokens_of(planned, split) == tokens_of(planned, whole)
    streamed = streamed_weights(split.module)
    assert streamed is not None
    (streams,) = late_copies.made
    copied = 2 if num_layers == 3 else num_layers  # of three layers, the middle one has a buffer of its own
    assert streamed.pass_bytes == copied * streamed.num_bytes // num_layers
    num_passes, rest = divmod(len(streams.copies) - 2, copied)
    assert (num_passes > 6, rest) == (True, 0), "each layer once per pass, and the first two ahead"
    close_streaming(split.module)


def test_layers_are_fused_with_weights_on_the_host(load_on_host: Load) -> None:
    """Weights on the host are counted as such."""
    whole, split = load_on_host("llama", 4, **ARCHITECTURES["llama"])
    assert make_ready_to_run(split.module) == make_ready_to_run(whole.module)
    streamed = streamed_weights(split.module)
    assert streamed is not None
    layer_bytes = streamed.num_bytes // 4
    assert streamed.stage_bytes == 2 * layer_bytes
    assert weights_bytes(split.module) == weights_bytes(whole.module) - 2 * layer_bytes
    assert sum(part.num_bytes for part in weights_by_part(split.module)) == weights_bytes(split.module)
    of_split, of_whole = model_work(split, torch.float32), model_work(whole, torch.float32)
    assert (of_split.streamed_bytes, of_whole.streamed_bytes) == (streamed.pass_bytes, 0)
    assert of_split.weights_bytes == of_whole.weights_bytes
    close_streaming(split.module)
    assert streamed_weights(split.module) is None


def test_forward_pass_that_fails_with_streamed_layers_does_not_affect_later_passes(
    load_on_host: Load, planned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, split = load_on_host("llama", 4, **ARCHITECTURES["llama"])
    expected = tokens_of(planned, whole)
    make_ready_to_run(split.module)
    layer = split.module.model.layers[4]
    forward = layer.forward

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no memory")

    layer.forward = fails
    with pytest.raises(RuntimeError, match="no memory"):
        tokens_of(planned, split)
    layer.forward = forward
    assert tokens_of(planned, split) == expected
    close_streaming(split.module)


def test_layer_copy_whose_cuda_event_could_not_be_created_is_repeated(
    load_on_host: Load, planned: Any, late_copies: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Creating a CUDA event may fail for lack of memory."""
    whole, split = load_on_host("llama", 4, **ARCHITECTURES["llama"])
    expected = tokens_of(planned, whole)
    make_ready_to_run(split.module)
    (streams,) = late_copies.made
    mark, num_left = streams.mark, 0

    def short(lane: Any) -> Any:
        nonlocal num_left
        num_left -= lane == "copy"
        if num_left == 0 and lane == "copy":
            streams.finish("copy")
            raise RuntimeError("CUDA error: out of memory")
        return mark(lane)

    for fails_at in range(1, 6):
        num_left = fails_at
        monkeypatch.setattr(streams, "mark", short)
        with pytest.raises(RuntimeError, match="out of memory"):
            tokens_of(planned, split)
        monkeypatch.setattr(streams, "mark", mark)
        assert tokens_of(planned, split) == expected
    close_streaming(split.module)


def test_host_memory_is_freed_at_the_end_and_after_a_failure(
    load_on_host: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure is missing host memory for the last layer."""
    slabs: list[HostSlab] = []
    close = HostSlab.close

    def closing(slab: HostSlab) -> None:
        slabs.append(slab)
        close(slab)

    monkeypatch.setattr(HostSlab, "close", closing)
    _, split = load_on_host("llama", 4, **ARCHITECTURES["llama"])
    make_ready_to_run(split.module)
    close_streaming(split.module)
    close_streaming(split.module)
    assert len(slabs) == 4
    assert not any(layer._forward_pre_hooks or layer._forward_hooks for layer in split.module.model.layers)
    _, split = load_on_host("llama", 4, **ARCHITECTURES["llama"])
    made: list[int] = []

    def none_left(num_places: int, num_bytes: int, pinner: Any) -> HostSlab:
        made.append(num_bytes)
        if len(made) == 3:
            raise MemoryError
        return HostSlab(num_places, num_bytes, pinner)

    monkeypatch.setattr(streaming, "HostSlab", none_left)
    with pytest.raises(KvscopeError, match="no host memory for the weights that stay there: give a smaller"):
        make_ready_to_run(split.module)
    assert len(slabs) == 6


def test_only_large_weights_are_streamed(load_on_host: Load) -> None:
    _, split = load_on_host("llama", 3, **ARCHITECTURES["llama"])
    for layer in split.module.model.layers:
        assert {name for _, name, tensor in large_tensors(layer)} == {"weight"}
        assert all(tensor.dim() == 2 for _, _, tensor in large_tensors(layer))
    make_ready_to_run(split.module)
    close_streaming(split.module)


def test_failed_engine_start_frees_host_memory(
    load_on_host: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The start fails before and after streaming was set up."""
    _, split = load_on_host("llama", 3, **ARCHITECTURES["llama"])
    close_streaming(split.module)
    assert not any(layer._forward_pre_hooks for layer in split.module.model.layers)
    slabs: list[HostSlab] = []
    close = HostSlab.close

    def closing(slab: HostSlab) -> None:
        slabs.append(slab)
        close(slab)

    monkeypatch.setattr(HostSlab, "close", closing)
    _, split = load_on_host("llama", 3, **ARCHITECTURES["llama"])
    monkeypatch.setattr(components, "load_model", lambda *_: split)
    config = EngineConfig(model=f"dummy:{tmp_path}/llama.json", kv_memory_bytes=1, cpu_offload_gb=1.0)
    with pytest.raises(BadInput, match="--kv-memory 1 is not accepted"):
        Engine(config)
    assert len(slabs) == 3


def test_lora_adapters_work_with_streamed_layers(
    load_on_host: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """LoRA weights stay on the device."""
    whole, split = load_on_host("llama", 3, num_hidden_layers=4)
    for seed, name in enumerate(("sql", "python")):
        write_adapter(tmp_path / name, whole.module, seed=seed)
    found = []
    for loaded, options in ((whole, {}), (split, {"cpu_offload_gb": 1.0})):
        monkeypatch.setattr(components, "load_model", lambda *_, given=loaded: given)
        adapters = tuple(LoraModule(name=name, path=str(tmp_path / name)) for name in ("sql", "python"))
        config = EngineConfig(
            dtype="float32",
            num_gpu_blocks_override=64,
            lora_modules=adapters,
            max_loras=1,
            quantization="none",
            **options,
        )
        engine = Engine(config)
        sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        submits = [
            Submit(request_id=f"{number}", prompt_token_ids=PROMPTS[0], sampling=sampling, adapter=name)
            for number, name in enumerate(("sql", "", "python", "sql"))
        ]
        found.append([tuple(one.token_ids) for one in engine.generate(submits)])
        engine.close()
    assert found[1] == found[0]
    assert len(set(found[0])) == 3


def test_engine_reports_streamed_bytes(load_on_host: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Reported in each step and in the memory breakdown; the tokens do not change."""
    whole, split = load_on_host("llama", 4, **ARCHITECTURES["llama"])
    config = EngineConfig(model=f"dummy:{tmp_path}/llama.json", kv_memory_bytes=4 << 20)
    submit = Submit(request_id="-", prompt_token_ids=(5, 6, 7), sampling=SamplingParams(temperature=0.0, max_tokens=5))
    tokens = []
    for loaded, options in ((whole, {}), (split, {"cpu_offload_gb": 1.0})):
        monkeypatch.setattr(components, "load_model", lambda *_, loaded=loaded: loaded)
        messages: list[TelemetryMessage] = []
        with Engine(replace(config, **options), publish=messages.append) as engine:
            tokens.append([completion.token_ids for completion in engine.generate([submit])])
            streamed = streamed_weights(loaded.module)
            expected = streamed.pass_bytes if streamed is not None else 0
            assert engine.memory().host_weights_bytes == expected
        works = [message.work for message in messages if isinstance(message, Frame) and message.work.flops]
        assert works
        assert {work.streamed_bytes for work in works} == {expected}
    assert tokens[0] == tokens[1]
    assert streamed_weights(split.module) is None, "streaming must be closed with the engine"
