"""GPU memory at each moment of a start, for 8, 14 and 30 billion parameters: the model fits or is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvscope_engine.bench.shapes import SHAPES as LLAMA_SHAPES
from kvscope_engine.model.cpu_offload import streaming
from kvscope_engine.model.device_memory.memory_plan import MemoryPlan, StepReserves, drop_large_piecewise_graphs
from kvscope_engine.model.kv_cache.kv_storage import block_bytes
from kvscope_engine.model.loaded_model import LoadedModel
from kvscope_engine.model.loader.download.model_names import ModelName
from kvscope_engine.model.loader.model_loader import (
    _check_gpu_memory,
    _keep_on_host,
    _make_ready,
)
from kvscope_engine.model.loader.supported_models import blueprint
from kvscope_engine.model.runner.kv_cache_spec import storage_for_model
from kvscope_engine.model.runner.pool_size import plan_memory
from kvscope_engine.model.verification.hook_check import check_hook
from kvscope_engine.model.verification.ready_to_run import make_ready_to_run
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.errors import KvscopeError
from kvscope_telemetry.messages.telemetry import ModelInfo

GIB = 1 << 30
CONTEXT_BYTES = 500 << 20
"""Compute capability of the emulated GPU."""
CARDS = {24: int(23.6 * GIB), 48: int(47.5 * GIB), 80: int(79.1 * GIB)}
"""Total bytes that torch reports for GPUs sold with this many GB."""
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": LLAMA_SHAPES["8b"],
    "qwen3-14b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
}
INPUTS_BYTES = 1 << 20
"""Maximum bytes of the ids and positions of the profiled step; later they are in the step buffer."""
CONFIG = EngineConfig(model="any")


def hf_config(name: str) -> Any:
    from transformers import AutoConfig

    shape = dict(SHAPES[name])
    return AutoConfig.for_model(shape.pop("model_type"), **shape)


def load(config: Any, name: str, cpu_offload_gb: float = 0.0) -> LoadedModel:
    """Return a model as the loader does: on the GPU except for offloaded layers, with our attention."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    with torch.device("cpu" if cpu_offload_gb else "cuda:0"), no_init():
        module = auto.from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
    if cpu_offload_gb:
        _keep_on_host(module, cpu_offload_gb, torch.device("cuda:0"))
    _make_ready(module)
    info = ModelInfo(
        name=name,
        architecture=type(module).__name__,
        dtype="bfloat16",
        num_layers=config.num_hidden_layers,
        num_query_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        num_parameters=0,
        max_model_len=config.max_position_embeddings,
    )
    device = torch.device("cuda:0")
    return LoadedModel(module, config, None, info, frozenset(), device, torch.bfloat16, config.max_position_embeddings)


def no_init() -> Any:
    """Skip filling the weights, which have no data."""
    from transformers.initialization import no_init_weights

    return no_init_weights()


@pytest.mark.parametrize(
    ("name", "smallest"),
    [
        ("llama-8b", 24),
        *(pytest.param(*case, marks=pytest.mark.storm) for case in (("qwen3-30b-a3b", 80), ("qwen3-14b", 48))),
    ],
)
def test_memory_peaks_of_every_phase_of_an_engine_start_fit_the_gpu(
    rehearsed: Callable[..., Any], name: str, smallest: int
) -> None:
    """With all layers, on the smallest supported GPU; a larger GPU only adds blocks."""
    with rehearsed(CARDS[smallest], runs_proofs=False) as gpu:
        moments = PeakRecorder(gpu)
        loaded = load(hf_config(name), name)
        moments.end("load")
        _check_joining(gpu, loaded)
        moments.end("hook and join")
        plan = _check_kv(gpu, loaded, moments)
        assert list(moments.peaks) == ["load", "hook and join", "profile", "blocks", "capture and step"]
        weights = plan.weights
        assert moments.peaks["load"] <= 1.01 * weights
        assert moments.peaks["hook and join"] <= 1.05 * weights
        assert moments.peaks["profile"] <= weights + plan.activations + plan.logits + INPUTS_BYTES
        assert moments.peaks["capture and step"] + CONTEXT_BYTES <= plan.allowed
        assert max(moments.peaks.values()) + CONTEXT_BYTES <= gpu.total_bytes
    for size, total in CARDS.items():
        larger = replace(plan, total=total)
        assert larger.fits == (size >= smallest)
        if larger.fits:
            assert larger.kv - plan.kv == pytest.approx(0.9 * (total - CARDS[smallest]), abs=8)
            assert larger.others + larger.needed + larger.kv == larger.allowed, "no memory may be unused"


def test_model_larger_than_the_gpu_runs_with_offloaded_weights(
    rehearsed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPU memory never exceeds the resident layers plus three; the freed memory goes to blocks."""
    monkeypatch.setattr(streaming, "CudaStreams", lambda _: ImmediateStreams())
    monkeypatch.setattr(streaming, "CudaPinner", lambda: None)
    monkeypatch.setattr(streaming, "HostSlab", FakeHostSlab)
    offloaded = replace(CONFIG, cpu_offload_gb=3.0, enforce_eager=True)
    config = hf_config("qwen3-14b")
    config.num_hidden_layers = 8
    config.layer_types = config.layer_types[:8]
    with rehearsed(8 * GIB, runs_proofs=False) as gpu:
        moments = PeakRecorder(gpu)
        loaded = load(config, "8 of 40 layers", offloaded.cpu_offload_gb)
        resident = gpu.held_bytes()
        moments.end("load")
        assert make_ready_to_run(loaded.module).layers == loaded.num_layers
        moments.end("hook and join")
        streamed = streaming.streamed_weights(loaded.module)
        assert streamed is not None
        assert resident + streamed.num_bytes > 0.9 * gpu.total_bytes
        assert 3 * GIB <= streamed.num_bytes < 4 * GIB
        assert gpu.held_bytes() == pytest.approx(resident + streamed.stage_bytes, rel=0.001)
        assert max(moments.peaks.values()) <= resident + 1.7 * streamed.stage_bytes
        one_block = block_bytes([c.shape for c in check_hook(loaded.module)], CONFIG.block_size, loaded.dtype)
        plan = plan_memory(offloaded, loaded, gpu, one_block)
        assert (plan.weights, plan.host_weights) == (gpu.held_bytes(), streamed.num_bytes)
        assert plan.summary("cuda:0").endswith("; weights in host memory 3.1 GiB, streamed each step")
        streaming.close_streaming(loaded.module)


class FakeHostSlab:
    """Host memory of which only the size exists."""

    note = ""

    def __init__(self, num_places: int, num_bytes: int, _: Any) -> None:
        self.num_bytes = num_places * num_bytes
        self.rows = torch.empty(num_places, num_bytes, dtype=torch.uint8)

    def close(self) -> None: ...


class ImmediateStreams:
    """Streams of a device that computes nothing."""

    def run(self, lane: str, work: Callable[[], None]) -> None:
        work()

    def mark(self, lane: str) -> object:
        return object()

    def wait(self, lane: str, mark: object) -> None: ...

    def finish(self, lane: str) -> None: ...


class PeakRecorder:
    """Peak GPU memory of each part of a start."""

    def __init__(self, gpu: Any) -> None:
        self._gpu = gpu
        self.peaks: dict[str, int] = {}

    def end(self, name: str, beyond: int = 0) -> None:
        """End the current part; `beyond` is memory that the emulation does not cover."""
        self.peaks[name] = self._gpu.peak_bytes() + beyond
        self._gpu.reset_peak()


def test_verification_needs_little_memory_besides_the_weights(rehearsed: Callable[..., Any]) -> None:
    """Uses four layers of the larger model: what is kept of one layer's run is small compared with the layer."""
    config = hf_config("qwen3-14b")
    config.num_hidden_layers = 4
    config.layer_types = config.layer_types[:4]
    with rehearsed(CARDS[24]) as gpu:
        loaded = load(config, "qwen3-14b")
        _check_joining(gpu, loaded)


def _check_joining(gpu: Any, loaded: LoadedModel) -> None:
    """Check that fusing never needs more than one layer beyond the weights, and keeps none of it."""
    weights = gpu.held_bytes()
    layers: Any = loaded.module.get_submodule("model.layers")
    largest = max(sum(p.nbytes for p in layer.parameters()) for layer in layers)
    gpu.reset_peak()
    assert make_ready_to_run(loaded.module).layers == loaded.num_layers
    assert gpu.peak_bytes() <= weights + 1.2 * largest
    assert gpu.held_bytes() <= 1.001 * weights
    assert gpu.peak_bytes() + CONTEXT_BYTES <= gpu.total_bytes


def _check_kv(gpu: Any, loaded: LoadedModel, moments: PeakRecorder) -> MemoryPlan:
    """Check that blocks get the memory that a step leaves, on this GPU and on larger ones."""
    one_block = block_bytes([c.shape for c in check_hook(loaded.module)], CONFIG.block_size, loaded.dtype)
    plan = plan_memory(CONFIG, loaded, gpu, one_block)
    plan.check("it", "cuda:0")
    moments.end("profile")
    before = gpu.held_bytes()
    storage = storage_for_model(loaded, plan.kv // one_block, CONFIG.block_size)
    moments.end("blocks")
    step = plan.step + plan.graphs
    assert plan.reserves.piecewise_graphs > 0, "they fit on the smallest card that is promised"
    moments.end("capture and step", step)
    assert gpu.held_bytes() - before == pytest.approx(plan.kv, rel=0.01)
    assert 0.95 * plan.allowed <= CONTEXT_BYTES + gpu.held_bytes() + step <= plan.allowed
    assert plan.activations > 1 << 28, "a step of 8,192 tokens was run"
    storage.close()
    return plan


def test_prefill_graphs_are_left_out_if_they_leave_little_for_blocks() -> None:
    plan = MemoryPlan(
        total=24 * GIB,
        utilization=1.0,
        others=0,
        weights=20 * GIB,
        activations=GIB,
        logits=0,
        reserves=StepReserves(piecewise_graphs=GIB // 2),
        staging=0,
        kv_min=2 << 20,
    )
    assert drop_large_piecewise_graphs(plan) is plan, "half a GiB of three"
    tight = replace(plan, weights=plan.weights + 2 * GIB)
    assert drop_large_piecewise_graphs(tight).kv == tight.kv + GIB // 2 == GIB
    assert drop_large_piecewise_graphs(tight, 1.0) is tight, "asked for"
    full = replace(plan, weights=23 * GIB - (GIB // 2))
    assert not full.fits
    assert drop_large_piecewise_graphs(full, 1.0).kv == GIB // 2
    assert "graphs 0.5 GiB" in plan.parts()
    assert "graphs" not in drop_large_piecewise_graphs(tight).parts()


def test_missing_memory_is_reported_by_part(rehearsed: Callable[..., Any]) -> None:
    plan = MemoryPlan(
        total=CARDS[24],
        utilization=0.9,
        others=CONTEXT_BYTES,
        weights=20 * GIB,
        activations=GIB,
        logits=GIB // 5,
        reserves=StepReserves(graphs=GIB // 4),
        staging=0,
        kv_min=2 << 20,
    )
    assert not plan.fits
    with pytest.raises(KvscopeError) as refused:
        plan.check("some/model", "cuda:0")
    assert str(refused.value) == (
        "no memory for model 'some/model': it needs 21.5 GiB (weights 20.0 GiB, activations 1.0 GiB, logits"
        " and sampling 0.2 GiB, graphs 0.2 GiB, KV cache 2.0 MiB), 20.8 GiB of the 23.6 GiB of cuda:0 may be used"
        " (--gpu-memory-utilization 0.9, others hold 0.5 GiB): free some, or give --gpu-memory-utilization 0.93"
    )
    with pytest.raises(KvscopeError, match=r"a GPU of \d+\.\d GiB holds it, this one a model whose weights take"):
        replace(plan, weights=28 * GIB).check("some/model", "cuda:0")
    replace(plan, weights=16 * GIB).check("some/model", "cuda:0")


def test_model_of_14b_on_24_gb_is_refused_before_loading(rehearsed: Callable[..., Any]) -> None:
    plan = blueprint(hf_config("qwen3-14b"), "qwen3-14b")
    with rehearsed(CARDS[24]) as gpu, pytest.raises(KvscopeError) as refused:
        _check_gpu_memory(plan, ModelName("hub", "Qwen/Qwen3-14B"), torch.bfloat16, gpu, CONFIG)
    assert str(refused.value) == (
        "no memory for model 'Qwen/Qwen3-14B': its 14.8 billion parameters take 27.5 GiB alone, 20.8 GiB of the"
        " 23.6 GiB of the GPU may be used: a step and some KV cache included, a model of about 9 billion fits there,"
        " and this one a GPU of 36.8 GiB, or --cpu-offload-gb 10 (slower: copied from host memory in each step)"
    )
    name = ModelName("hub", "Qwen/Qwen3-14B")
    with rehearsed(CARDS[24]) as gpu, pytest.raises(KvscopeError) as refused:
        _check_gpu_memory(plan, name, torch.bfloat16, gpu, replace(CONFIG, cpu_offload_gb=4.0))
    assert "take 23.5 GiB beside 4.0 GiB in host memory, 20.8 GiB of" in str(refused.value)
    assert "or --cpu-offload-gb 10 (slower" in str(refused.value)
    with rehearsed(CARDS[24]) as gpu:
        _check_gpu_memory(plan, name, torch.bfloat16, gpu, replace(CONFIG, cpu_offload_gb=10.0))
    with rehearsed(CARDS[24]) as gpu:
        small = blueprint(hf_config("llama-8b"), "llama-8b")
        _check_gpu_memory(small, ModelName("hub", "some/8B"), torch.bfloat16, gpu, CONFIG)


def test_desktop_and_other_engines_keep_their_memory(rehearsed: Callable[..., Any]) -> None:
    """On a GPU that draws the desktop, next to an engine that has not yet allocated all it planned."""
    plan = blueprint(hf_config("llama-8b"), "llama-8b")
    with rehearsed(CARDS[24], runs_proofs=False) as gpu:
        config = hf_config("llama-8b")
        config.num_hidden_layers = 2
        config.layer_types = None
        loaded = load(config, "2 of 32 layers")
        one_block = block_bytes([c.shape for c in check_hook(loaded.module)], CONFIG.block_size, loaded.dtype)
        wide = replace(CONFIG, gpu_memory_utilization=0.99)
        alone = plan_memory(wide, loaded, gpu, one_block)
        gpu.promised = 2 * GIB
        beside = plan_memory(wide, loaded, gpu, one_block)
        assert (beside.others - alone.others, alone.kv - beside.kv) == (2 * GIB, 2 * GIB)
        gpu.draws = True
        desktop = plan_memory(wide, loaded, gpu, one_block)
        assert desktop.allowed == gpu.total_bytes - GIB
        assert beside.kv - desktop.kv == beside.allowed - desktop.allowed
        assert desktop.desktop == GIB
        gpu.promised = 8 * GIB
        with pytest.raises(KvscopeError, match=r"11\.\d GiB of the 23\.6 GiB of the GPU may be used"):
            _check_gpu_memory(plan, ModelName("hub", "some/8B"), torch.bfloat16, gpu, wide)
