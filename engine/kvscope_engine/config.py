"""How an engine is set up. Frozen; what can be derived is a property of who needs it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from kvscope_engine.policy.allocation.names import ENGINE_ALLOCATORS
from kvscope_engine.policy.drafting.config import SpeculativeConfig
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.kv_events.config import KvEventsConfig

DEVICES: Final = ("auto", "cpu", "cuda")
DTYPES: Final = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS: Final = ("auto", "none", "a8", "int8", "int4")
GENERATION_CONFIGS: Final = ("auto", "none", "vllm")
KV_DTYPES: Final = ("auto", "fp8", "fp8_e4m3", "int8")
"""`fp8_e4m3` is vLLM's other name for `fp8`."""
"""`oracle` knows lengths that an engine cannot: the simulator's alone."""
PREEMPTIONS: Final = ("auto", "recompute", "swap")
ATTENTION_BACKENDS: Final = ("auto", "kvscope", "flashinfer", "flash-attn")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of an engine, with vLLM's names where they mean the same.

    Raises BadInput for a value outside its range; what only the device or the model can tell (memory that is
    not there, a length the model cannot do) is checked at load.
    """

    model: str = "default"
    """`default`, a Hugging Face id, a folder, a `.gguf` file, or `dummy:CONFIG.json`."""
    device: str = "auto"
    dtype: str = "auto"
    """Of weights and activations."""
    quantization: str = "auto"
    """Of linear layers. `auto` reads a file's 4 or 8 bits as they lie and leaves activations as they are, so tokens are
    those of widened weights; `none` widens. The others are for a CPU's speed and change tokens: `a8` is `auto` with
    activations rounded to 8 bits, `int8` and `int4` round any model's weights, on a CPU activations as well."""
    kv_cache_dtype: str = "auto"
    """Of the blocks; `auto` is that of the activations, the others have 8 bits and a scale per token and KV head."""
    block_size: int = 16
    """Slots (tokens) a block."""
    max_model_len: int | None = None
    """Tokens of prompt and output together; None is the model's own limit."""
    max_num_seqs: int = 64
    """Requests that run in one step."""
    max_num_batched_tokens: int | None = None
    """Tokens computed in one step; None chooses by device."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory the engine may take."""
    num_gpu_blocks_override: int | None = None
    """Exactly this many blocks, whatever the memory says (also on a CPU)."""
    kv_memory_bytes: int | None = None
    """Bytes for the block pool; None chooses by device."""
    enable_prefix_caching: bool | None = None
    """None: wherever the allocator shares blocks."""
    host_kv_memory_bytes: int = 0
    """Host memory below the pool, for swapped requests and evicted prefixes; 0: no such tier."""
    disk_kv_memory_bytes: int = 0
    """A file below host memory; 0: none. Needs the host tier."""
    disk_kv_path: str | None = None
    """That file; None: a temporary one, gone at exit."""
    keep_disk_kv: bool = False
    """Whether a file with a path stays at exit, and what it holds is used at the next start."""
    preemption: str = "auto"
    """What becomes of a preempted request's blocks: `recompute`, `swap` to the host tier, or what is cheaper."""
    allocator: str = "paged"
    """How a request gets its blocks. All but `paged` place a request's blocks in a row and share none: no prefix
    caching, which is refused where it is asked for."""
    page_heat: int = 0
    """In every so many steps with decodes it is measured how much of each request's attention fell on each of its
    blocks; 0: never."""
    sparse_decode: float | None = None
    """The fraction of its blocks that each decode attends to, by KV head and layer, but for the first two layers; None:
    all. Prompts are read in full."""
    tensor_parallel_size: int = 1
    """Ranks, each a process with a device and its share of every layer's heads and weights; on GPUs without CUDA
    graphs."""
    cpu_offload_gb: float = 0.0
    """GiB of weights that stay in host memory of a GPU's engine, whole layers from the last one back, and are copied to
    the GPU in each forward pass; such an engine runs without CUDA graphs."""
    enforce_eager: bool = False
    """On a GPU: no CUDA graphs, so that the host hands over each launch of a step."""
    piecewise_graphs: bool = False
    """On a GPU: steps with prefills of up to 512 tokens run as CUDA graphs between attention, which runs eagerly."""
    attention_backend: str = "auto"
    """On a GPU, whose attention runs prompts: `auto` tries the libraries that are installed beside ours and takes the
    fastest; `kvscope` is ours. Decodes, and layers that a library has no word for, are always ours."""
    async_scheduling: bool | None = None
    """Whether a step is scheduled and launched while the one before runs; None: on a GPU."""
    speculative_config: SpeculativeConfig | None = None
    """How tokens are guessed ahead of the model; None: they are not."""
    generation_config: str = "auto"
    """`auto`: how the model's makers would have it sampled (its generation_config.json, or a GGUF file's own keys)
    holds for requests that do not say; `none`, which vLLM calls `vllm`: it does not."""
    seed: int = 0
    """For requests that bring none."""
    kv_events_config: KvEventsConfig | None = None
    """How KV events are published; None: they are not."""
    num_threads: int | None = None
    """CPU threads, always that many; None: one for each core that may be used, fewer while other programs use them."""

    def __post_init__(self) -> None:
        _one_of("device", self.device, DEVICES)
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("quantization", self.quantization, QUANTIZATIONS)
        _one_of("generation_config", self.generation_config, GENERATION_CONFIGS)
        _one_of("kv_cache_dtype", self.kv_cache_dtype, KV_DTYPES)
        _one_of("allocator", self.allocator, ENGINE_ALLOCATORS)
        if self.allocator != "paged" and self.enable_prefix_caching:
            raise BadInput(
                f"allocator={self.allocator!r} is not accepted with prefix caching: leave out --enable-prefix-caching"
            )
        if self.allocator != "paged" and self.speculative_config is not None:
            raise BadInput(
                f"allocator={self.allocator!r} is not accepted with speculation (--speculative-config): blocks for"
                " drafts are given back, which only `paged` can"
            )
        _one_of("preemption", self.preemption, PREEMPTIONS)
        _one_of("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        self._check_tiers()
        _whole("block_size", self.block_size, 1, 1024)
        _whole("max_num_seqs", self.max_num_seqs, 1, 1 << 16)
        for name in ("max_model_len", "max_num_batched_tokens", "num_gpu_blocks_override", "num_threads"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 1, 1 << 31)
        _whole("page_heat", self.page_heat, 0, 1 << 31)
        if self.sparse_decode is not None:
            self._check_sparse()
        _whole("tensor_parallel_size", self.tensor_parallel_size, 1, 64)
        if self.tensor_parallel_size > 1:
            self._check_ranks()
        if self.kv_memory_bytes is not None:
            _whole("kv_memory_bytes", self.kv_memory_bytes, 1, 1 << 50)
        share = self.gpu_memory_utilization
        if not (math.isfinite(share) and 0.0 < share <= 1.0):
            raise BadInput(f"gpu_memory_utilization={share!r} is not accepted: above 0 and at most 1")
        offload = self.cpu_offload_gb
        if isinstance(offload, bool) or not 0.0 <= offload <= 1 << 20:
            raise BadInput(f"cpu_offload_gb={offload!r} is not accepted: GiB, from 0 to {1 << 20}")
        if not self.model:
            raise BadInput("model='' is not accepted: a name, a folder or a file")

        if self.publishes_kv_events and not self.prefix_caching:
            raise BadInput(
                "kv_events_config: enable_kv_cache_events=True is not accepted without prefix caching:"
                " nothing is kept that could be told of"
            )

    @property
    def prefix_caching(self) -> bool:
        """Whether prompts that begin alike share blocks."""
        return self.allocator == "paged" if self.enable_prefix_caching is None else self.enable_prefix_caching

    @property
    def publishes_kv_events(self) -> bool:
        """Whether KV events are published."""
        return self.kv_events_config is not None and self.kv_events_config.is_on

    def _check_ranks(self) -> None:
        """What one rank alone would do with its own bytes is not done."""
        refused = (
            ("host_kv_memory_bytes", self.host_kv_memory_bytes, 0, "lower tiers keep the blocks of one device"),
            ("quantization", self.quantization if self.quantization != "none" else "auto", "auto", "shares stay whole"),
            (
                "async_scheduling",
                self.async_scheduling or None,
                None,
                "other ranks get tokens only",
            ),
            ("cpu_offload_gb", self.cpu_offload_gb, 0, "weights are streamed to one device"),
            (
                "attention_backend",
                self.attention_backend if self.attention_backend != "kvscope" else "auto",
                "auto",
                "each rank would choose for itself",
            ),
            ("page_heat", self.page_heat, 0, "attention is measured on all heads of one device"),
            ("allocator", self.allocator if self.allocator == "virtual" else "", "", "it maps pages of one device"),
        )
        for name, value, accepted, why in refused:
            if value != accepted:
                size = self.tensor_parallel_size
                raise BadInput(f"{name}={value!r} is not accepted with tensor_parallel_size={size}: {why}")

    def _check_sparse(self) -> None:
        share = self.sparse_decode
        if not isinstance(share, float | int) or isinstance(share, bool) or not 0.0 < share <= 1.0:
            raise BadInput(f"sparse_decode={share!r} is not accepted: above 0 and at most 1")
        if self.piecewise_graphs:
            raise BadInput(
                f"sparse_decode={share!r} is not accepted with piecewise_graphs: blocks are not chosen there"
            )
        if self.speculative_config is not None:
            raise BadInput(
                f"sparse_decode={share!r} is not accepted with speculation (--speculative-config): drafts are checked"
                " with full attention, so the tokens would not be the same"
            )

    def _check_tiers(self) -> None:
        for name in ("host_kv_memory_bytes", "disk_kv_memory_bytes"):
            _whole(name, getattr(self, name), 0, 1 << 50)
        if self.host_kv_memory_bytes and self.allocator != "paged":
            raise BadInput(
                f"host_kv_memory_bytes={self.host_kv_memory_bytes} is not accepted with allocator={self.allocator!r}:"
                " only `paged` has lower tiers"
            )
        if self.preemption == "swap" and not self.host_kv_memory_bytes:
            raise BadInput("preemption='swap' is not accepted without host memory to swap to (--kv-host-memory)")
        if self.disk_kv_memory_bytes and not self.host_kv_memory_bytes:
            raise BadInput(
                f"disk_kv_memory_bytes={self.disk_kv_memory_bytes} (--kv-disk) is not accepted without host memory"
                " above it (--kv-host-memory)"
            )
        if self.disk_kv_path is not None and not self.disk_kv_memory_bytes:
            raise BadInput(f"disk_kv_path={self.disk_kv_path!r} is not accepted without a size (--kv-disk)")
        if self.keep_disk_kv and self.disk_kv_path is None:
            raise BadInput("keep_disk_kv=True is not accepted without a file to keep (--kv-disk-path)")


def _one_of(name: str, value: str, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        raise BadInput(f"{name}={value!r} is not accepted: one of {', '.join(accepted)}")


def _whole(name: str, value: int, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise BadInput(f"{name}={value!r} is not accepted: a whole number from {low} to {high}")
