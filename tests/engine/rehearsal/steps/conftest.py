"""An emulated GPU: tensors without data on `cuda:0`, and kernels that are only recorded.

torch's fake tensors refuse operands on different devices and raise if data is read on the host. Launches of Triton
kernels are recorded with their arguments and the key under which Triton would look up the compiled kernel. A CUDA
graph is an entry in a pool, which exists as long as a graph does. Transfers between host and device are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any, Final
from weakref import WeakSet

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kvscope_engine.model.device_memory import step_buffer
from kvscope_engine.model.kv_cache.kv_storage import KVStorage, LayerShape
from kvscope_engine.model.kv_cache.state_storage import StatePart, StateStorage
from kvscope_engine.model.layers.attention.mla.latent_modules import store_latents
from kvscope_engine.model.layers.attention.mla.latents import latents_of
from kvscope_engine.model.layers.attention.paged_attention import ATTENTION_NAME, AttentionOptions, register_attention
from kvscope_engine.model.layers.fused import fused_experts, fused_mlp
from kvscope_engine.model.layers.fused.all_reduce import AllReduce, install_all_reduce
from kvscope_engine.model.layers.fused.float32_head import use_float32_logits
from kvscope_engine.model.layers.fused.fused_attention import attention_candidates
from kvscope_engine.model.layers.fused.fused_experts import experts_candidate
from kvscope_engine.model.layers.fused.fused_layer import chain_layers, layer_candidate
from kvscope_engine.model.layers.fused.fused_mlp import mlp_candidate
from kvscope_engine.model.layers.fused.fused_norm import norm_candidates
from kvscope_engine.model.layers.recurrent.recurrent_layers import recurrent_layers
from kvscope_engine.model.runner import model_runner
from kvscope_engine.model.runner.model_runner import ModelRunner, OtherRanks
from kvscope_engine.model.runner.runner_config import RunnerConfig
from kvscope_engine.model.verification.fuse import replace_part
from kvscope_kernels import Ops
from kvscope_kernels.fused_moe.expert_weights import Gate
from kvscope_kernels.gated_activation import SILU

GPU: Final = torch.device("cuda:0")
CAPABILITY: Final = 90
NUM_MULTIPROCESSORS: Final = 132
VOCABULARY: Final = 4000
NO_KERNEL: Final = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "_unsafe_view", "detach", "alias"})
"""Operations that only allocate or return views."""


@dataclass
class RecordedWork:
    """Kernels that were launched, data that was transferred, and what was waited for."""

    launches: Counter[str] = field(default_factory=Counter)
    """Triton launches by kernel."""
    replays: int = 0
    read_backs: int = 0
    uploads: int = 0
    waits: int = 0
    """How often the host waited for an event that the device had not passed yet."""
    now: int = 0
    """Amount of work given to the device."""
    reached: int = 0
    """Amount of that work that the host knows to be complete."""
    compiled: set[str] = field(default_factory=set)
    """Keys of the kernels that had to be compiled."""

    def clear(self) -> None:
        """Clear everything except the compiled kernels."""
        self.launches.clear()
        self.replays = self.read_backs = self.uploads = self.waits = 0

    def wait(self, moment: int) -> None:
        """Wait until the device has passed `moment`."""
        self.waits += moment > self.reached
        self.reached = max(self.reached, moment)


class TransferCounter(TorchDispatchMode):
    """Counts copies between host and device."""

    def __init__(self, seen: RecordedWork) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source = args[1] if func is torch.ops.aten.copy_.default else args[0]
            self._seen.uploads += source.device.type == "cpu" and result.device.type == "cuda"
            self._seen.read_backs += source.device.type == "cuda" and result.device.type == "cpu"
        return result


class OperationNames(TorchDispatchMode):
    """Collects the names of torch's own operations that start a kernel on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, tuple | list) and result else result
        name = func.overloadpacket.__name__
        starts_none = func.is_view or name in NO_KERNEL
        if isinstance(first, torch.Tensor) and first.device == GPU and not starts_none:
            self.names.append(name)
        return result


class KernelKeys:
    """Computes Triton's specialization keys for fake tensors."""

    def __init__(self) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import make_backend

        self._backend = make_backend(GPUTarget("cuda", CAPABILITY, 32))
        self._binders: dict[str, Any] = {}

    def key(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Return the key as `JITFunction.run` makes it."""
        from triton.runtime.jit import create_function_from_signature

        name = kernel.fn.__name__
        if name not in self._binders:
            self._binders[name] = create_function_from_signature(kernel.signature, kernel.params, self._backend)
        seen = (Pointer(arg) if isinstance(arg, torch.Tensor) else arg for arg in args)
        _, specialization, options = self._binders[name](*seen, **kwargs)
        return f"{name} {specialization} {options}"


class Pointer:
    """A tensor as seen by Triton; addresses are multiples of 512."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = tensor.dtype
        self._address = (1 << 20) + tensor.storage_offset() * tensor.element_size()

    def data_ptr(self) -> int:
        """Address of the first element."""
        return self._address


class FakeEvent:
    """Event that the device passes when the host waits for it or queries it."""

    def __init__(self, seen: RecordedWork, **_: Any) -> None:
        self._seen = seen
        self._moment = 0

    def record(self, *_: Any) -> None:
        self._seen.now += 1
        self._moment = self._seen.now

    def synchronize(self) -> None:
        self._seen.wait(self._moment)

    def query(self) -> bool:
        self._seen.reached = max(self._seen.reached, self._moment)
        return True

    def elapsed_time(self, other: FakeEvent) -> float:
        assert max(self._moment, other._moment) <= self._seen.reached, "CUDA refuses to tell of what is not over"
        return 1.0


@dataclass
class EmulatedGpu:
    """Everything that the tests of this folder need."""

    seen: RecordedWork
    mode: FakeTensorMode
    make_runner: Callable[..., ModelRunner]
    capture_error: list[Exception | None] = field(default_factory=list)
    """Errors of the next captures, last one first; None for a capture that succeeds."""
    pools: dict[Any, WeakSet[Any]] = field(default_factory=dict)
    """Graphs of each memory pool."""
    held: list[int] = field(default_factory=list)
    """Number of live graphs at the start of each capture."""
    held_when_emptied: list[int] = field(default_factory=list)
    """Number of live graphs whenever memory was returned to the driver."""
    handles: Iterator[tuple[int, int]] = field(default_factory=lambda: ((0, number) for number in count()))

    @property
    def num_held(self) -> int:
        """Number of live graphs."""
        return sum(map(len, self.pools.values()))

    def begin(self, graph: Any, pool: Any) -> None:
        """Record the start of a capture."""
        assert self.pools.get(pool) != WeakSet(), "torch has forgotten the pool, and fails an assertion"
        self.held.append(self.num_held)
        self.pools.setdefault(pool, WeakSet()).add(graph)
        if self.capture_error and (error := self.capture_error.pop()) is not None:
            raise error


@pytest.fixture
def operations() -> type[OperationNames]:
    """The class that collects operation names."""
    return OperationNames


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch, indexing: type[TorchFunctionMode]) -> Iterator[EmulatedGpu]:
    """Emulated GPU: every tensor is fake. Skips if Triton is not installed or is interpreting."""
    jit = pytest.importorskip("triton.runtime.jit")
    seen, mode = RecordedWork(), FakeTensorMode()
    gpu = EmulatedGpu(seen, mode, lambda **options: make_runner(monkeypatch, **options))
    _stand_in_for_cuda(monkeypatch, gpu)
    _stand_in_for_triton(monkeypatch, jit, seen)
    with mode, TransferCounter(seen), indexing():
        yield gpu


def _stand_in_for_triton(monkeypatch: pytest.MonkeyPatch, jit: Any, seen: RecordedWork) -> None:
    keys = KernelKeys()

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        assert all(arg.device == GPU for arg in args if isinstance(arg, torch.Tensor)), "a launch mixes devices"
        assert all(size > 0 for size in grid), f"an empty grid: {grid}"
        seen.launches[kernel.fn.__name__.strip("_").removesuffix("_kernel")] += 1
        seen.compiled.add(keys.key(kernel, args, kwargs))

    monkeypatch.setattr(jit.JITFunction, "run", run)


def _stand_in_for_cuda(monkeypatch: pytest.MonkeyPatch, gpu: EmulatedGpu) -> None:
    seen = gpu.seen

    class FakeGraph:
        _crossed: tuple[int, int, int] | None = None
        _pool: Any = None

        def capture_begin(self, pool: Any = None, capture_error_mode: str = "") -> None:
            assert pool is not None, "all graphs of a run share memory"
            gpu.begin(self, pool)
            self._crossed = seen.uploads, seen.read_backs, seen.waits

        def capture_end(self) -> None:
            if self._crossed is None:
                raise RuntimeError("no capture was begun")
            assert self._crossed == (seen.uploads, seen.read_backs, seen.waits), "a graph waits for nothing"

        def pool(self) -> Any:
            assert self._pool is not None, "it was captured"
            return self._pool

        def replay(self) -> None:
            seen.replays += 1

    @contextmanager
    def capturing(graph: FakeGraph, pool: Any = None, capture_error_mode: str = "") -> Iterator[None]:
        graph._pool = pool or next(gpu.handles)
        gpu.begin(graph, graph._pool)
        uploads, read_backs = seen.uploads, seen.read_backs
        yield
        assert (uploads, read_backs) == (seen.uploads, seen.read_backs), "a graph holds no copies from or to the host"

    def pinned(num_bytes: int) -> tuple[torch.Tensor, Any]:
        return torch.empty(num_bytes, dtype=torch.uint8), np.zeros(num_bytes, np.uint8)

    properties = SimpleNamespace(multi_processor_count=NUM_MULTIPROCESSORS, name="fake", total_memory=80 << 30)
    for name, stand_in in {
        "CUDAGraph": FakeGraph,
        "graph": capturing,
        "Event": partial(FakeEvent, seen),
        "synchronize": lambda *_: seen.wait(seen.now),
        "empty_cache": lambda: gpu.held_when_emptied.append(gpu.num_held),
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: divmod(CAPABILITY, 10),
        "Stream": lambda *_: SimpleNamespace(wait_event=lambda _: None),
        "graph_pool_handle": lambda: next(gpu.handles),
        "stream": lambda *_: nullcontext(),
        "current_stream": lambda *_: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(step_buffer, "pinned_bytes", pinned)


def make_runner(
    monkeypatch: pytest.MonkeyPatch,
    *,
    num_blocks: int = 64,
    max_num_seqs: int = 8,
    kv_dtype: torch.dtype = torch.bfloat16,
    max_model_len: int = 4096,
    enforce_eager: bool = False,
    piecewise_graphs: bool = False,
    page_heat: int = 0,
    sparse_decode: float | None = None,
    max_drafts: int = 0,
    ops: Ops | None = None,
    architecture: str = "llama",
    fuses_experts: bool = True,
    num_layers: int = 2,
    together: bool = False,
    others: OtherRanks | None = None,
    all_reduce: AllReduce | None = None,
    joined: Callable[[torch.nn.Module], object] = lambda module: None,
    **config_changes: Any,
) -> ModelRunner:
    """Return a runner of a small model with fused parts, which are passed to `joined`. Verification at load, which
    reads data, is left out.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": num_layers,
        "head_dim": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": max_model_len,
    }
    config = AutoConfig.for_model(architecture, **(sizes | config_changes))
    register_attention()
    auto: Any = AutoModelForCausalLM
    module = auto.from_config(config, dtype=torch.bfloat16).eval()
    _move(module)
    module.set_attn_implementation(ATTENTION_NAME)
    monkeypatch.setattr(model_runner, "make_ready_to_run", join_unproven)
    monkeypatch.setattr(model_runner, "weights_bytes", lambda _: 0)
    monkeypatch.setattr(fused_mlp, "activation_kind_of", lambda *_: SILU)
    monkeypatch.setattr(fused_experts, "gate_of", lambda *_: Gate(SILU) if fuses_experts else None)
    store_latents(module, ATTENTION_NAME)
    held = [latents for part in module.modules() if (latents := latents_of(part)) is not None]
    states = _states(module, 2 * max_num_seqs + 1)
    layers = [LayerShape(1, each.stored_dim, latent_dim=each.latent_dim) for each in held] or [
        LayerShape(2, 64, bounds_dtype=torch.bfloat16 if sparse_decode is not None and index >= 2 else None)
        for index in range(num_layers if states is None else 1)
    ]
    storage = KVStorage(num_blocks, 16, layers, kv_dtype, GPU)
    loaded: Any = SimpleNamespace(
        device=GPU,
        module=module,
        eos_token_ids=frozenset((2,)),
        info=SimpleNamespace(vocab_size=VOCABULARY),
        max_model_len=max_model_len,
        dtype=torch.bfloat16,
        quantization="none",
    )
    made = ModelRunner(
        loaded,
        storage,
        RunnerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=512,
            max_drafts=max_drafts,
            enforce_eager=enforce_eager,
            piecewise_graphs=piecewise_graphs,
            shares_graphs=together,
            page_heat=page_heat,
            sparse_decode=sparse_decode,
        ),
        states=states,
        ops=ops,
        others=others,
    )
    if all_reduce is not None:
        install_all_reduce(module, all_reduce)
    joined(module)
    return made


def _states(module: torch.nn.Module, num_slots: int) -> StateStorage | None:
    """Return the states of gated delta net layers, as measured on a real device."""
    recurrent = recurrent_layers(module)
    if not recurrent.layers:
        return None
    for layer in recurrent.layers:
        part: Any = layer.module
        conv = StatePart("conv", 0, (part.conv_dim, part.conv_kernel_size), torch.bfloat16)
        layer.state = (
            conv,
            StatePart("recurrent", 0, (part.num_v_heads, part.head_k_dim, part.head_v_dim), torch.float32),
        )
        layer.supports_pieces = layer.supports_batches = True
    for part in module.modules():
        if hasattr(part, "layer_idx") and hasattr(part, "q_proj"):
            part.kvscope_layer = 0  # type: ignore[assignment]
    return StateStorage(num_slots, recurrent.states, GPU, has_pad=True)


def join_unproven(module: torch.nn.Module, quantization: str) -> None:
    """Fuse in the same order as at load, each part by the first form that fits a Llama or a Qwen3."""
    use_float32_logits(module)
    for part in list(module.modules()):
        if hasattr(part, "q_proj") and latents_of(part) is None and not _is_gated(part):
            options = AttentionOptions(float(part.scaling))  # type: ignore[arg-type]
            replace_part(part, next(attention_candidates(part, options, False)))
        elif mlp := mlp_candidate(part, False):
            replace_part(part, mlp)
        elif experts := experts_candidate(part):
            replace_part(part, experts)
    for part in list(module.modules()):
        if "Gated" not in type(part).__name__ and (norms := norm_candidates(part)):
            replace_part(part, norms[0])
    for part in list(module.modules()):
        if layer := layer_candidate(part):
            layer.keeps_float32 = True
            replace_part(part, layer)
    chain_layers(module)


def _is_gated(attention: Any) -> bool:
    """Return whether queries come with as many gates, which Llama's attention does not have."""
    return bool(attention.q_proj.out_features > attention.config.num_attention_heads * attention.head_dim)


def _move(module: torch.nn.Module) -> None:
    """Move to the device part by part, because `Module.to` asks CUDA."""
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            moved = torch.empty(parameter.shape, dtype=parameter.dtype, device=GPU)
            part._parameters[name] = torch.nn.Parameter(moved, requires_grad=False)
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=GPU)
