"""Configuration of an engine: all of its options. Frozen. Derived values are properties here, or belong to the modules
that use them.

An option is one field with its default, bounds and help text. The command lines of the engine and of the desktop (which
passes options on) and the checks are derived from it (`options`). The module is in this package, which does not import
torch, so that the desktop can use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.json_option import read_json_option
from kvscope_telemetry.kv_events.kv_events_config import KvEventsConfig, parse_config
from kvscope_telemetry.messages.commands import MAX_ADAPTER_CHARACTERS
from kvscope_telemetry.options import (
    Gib,
    Json,
    OneOf,
    OnOff,
    PositiveShare,
    Several,
    Size,
    Switch,
    Text,
    Whole,
    check_options,
    option,
)

DEVICES: Final = ("auto", "cpu", "cuda")
DTYPES: Final = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS: Final = ("auto", "none", "a8", "int8", "int4", "fp8")
PREEMPTIONS: Final = ("auto", "recompute", "swap")
ENGINE_ALLOCATORS: Final = ("paged", "contiguous", "buddy", "virtual")
DEFAULT_LOOKUP: Final = 5
_MANY: Final = 1 << 31
_SEED: Final = 1 << 63
_MODEL: Final = "model"
_CACHE: Final = "KV cache"
_TIERS: Final = "lower tiers of the KV cache"
_LORA: Final = "LoRA adapters"
_SCHEDULER: Final = "scheduler"
_VLLM_BACKENDS: Final = (("FLASHINFER", "flashinfer"), ("FLASH_ATTN", "flash-attn"), ("TRITON_ATTN", "kvscope"))
_SPECULATIVE: Final = "--speculative-config"
_LORA_MODULES: Final = "--lora-modules"
LORA_MODULE_FORMS: Final = 'NAME=FOLDER, or {"name": "NAME", "path": "FOLDER"}'
_Count = Annotated[int, Meta(ge=1, le=64)]


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speculative decoding by n-gram lookup, vLLM's `ngram`.

    Drafts are the tokens that followed the same n-gram earlier in the request's text.
    """

    num_speculative_tokens: _Count
    """Maximum number of draft tokens per request and step."""
    method: Literal["ngram"] = "ngram"
    prompt_lookup_max: _Count | None = None
    """Maximum n-gram length; `prompt_lookup_min` is the minimum. Without either, both are 5; if only one is given, the
    other has the same value.
    """
    prompt_lookup_min: _Count | None = None

    @property
    def longest(self) -> int:
        return self.prompt_lookup_max or self.prompt_lookup_min or DEFAULT_LOOKUP

    @property
    def shortest(self) -> int:
        return self.prompt_lookup_min or self.prompt_lookup_max or DEFAULT_LOOKUP


def parse_speculative_config(text: str) -> SpeculativeConfig:
    """Parse a JSON object. Raises BadInput with a one-line message for anything else."""
    config = read_json_option(_SPECULATIVE, text, SpeculativeConfig)
    if config.shortest > config.longest:
        raise BadInput(
            f"{_SPECULATIVE}: prompt_lookup_min={config.shortest} is not accepted: must be at most prompt_lookup_max"
            f" ({config.longest})"
        )
    return config


class LoraModule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1, max_length=MAX_ADAPTER_CHARACTERS)]
    path: Annotated[str, Meta(min_length=1)]
    """Folder in PEFT's format."""


def parse_lora_module(text: str) -> LoraModule:
    """Parse `name=path` or a JSON object with both. Raises BadInput with a one-line message for anything else."""
    if text.lstrip().startswith("{"):
        return read_json_option(_LORA_MODULES, text, LoraModule)
    name, equals, path = text.partition("=")
    if not (name.strip() and equals and path.strip()):
        raise BadInput(f"{_LORA_MODULES} {text!r:.200} is not accepted: {LORA_MODULE_FORMS}")
    if len(name) > MAX_ADAPTER_CHARACTERS:
        raise BadInput(
            f"{_LORA_MODULES}: name {name!r:.80} is not accepted: must be at most {MAX_ADAPTER_CHARACTERS} characters"
        )
    return LoraModule(name=name, path=path)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of an engine, named as in vLLM where they have the same meaning.

    Raises BadInput for a value outside its range. Values that depend on the device or the model (available memory,
    maximum length) are checked at load.
    """

    model: str = option(
        "default",
        Text("a name, a folder or a file"),
        group=_MODEL,
        metavar="M",
        help="`default` (SmolLM2-135M-Instruct), a Hugging Face id, a folder with safetensors,"
        " a .gguf file, or dummy:CONFIG.json for random weights",
        brief="`default`, a Hugging Face id, a folder, a .gguf file, or dummy:CONFIG.json",
    )
    device: str = option(
        "auto", OneOf(DEVICES), group=_MODEL, metavar="D", help="device of the model", brief="auto, cpu or cuda"
    )
    dtype: str = option(
        "auto",
        OneOf(DTYPES),
        group=_MODEL,
        metavar="T",
        help="data type of weights and activations",
        brief="data type of weights and activations: auto, float32, bfloat16 or float16",
    )
    quantization: str = option(
        "auto",
        OneOf(QUANTIZATIONS),
        group=_MODEL,
        metavar="Q",
        help="auto: keep the 4 or 8 bits of a GGUF, GPTQ, AWQ or compressed-tensors file (on a GPU only 4 bits, and not"
        " GGUF), with the same tokens as none; none: widen the weights to --dtype (more memory, slower). The others"
        " change the tokens, and are faster on a CPU, most of all for batches. a8: like auto, and round activations"
        " to 8 bits, as llama.cpp does; int8 and int4: round the weights of any model, with one scale per 64 (int8)"
        " or 32 (int4) inputs, and on a CPU the activations too; fp8: GPU only: round weights and activations, with"
        " one scale per weight row and per token",
        brief="weights: auto (as in the file) or none (widened), with the same tokens; a8 (auto with 8-bit"
        " activations), int8 or int4 (faster on a CPU, different tokens); fp8 (GPU only, different"
        " tokens)",
    )
    generation_config: str = option(
        "auto",
        OneOf(("auto", "none", "vllm")),
        group=_MODEL,
        metavar="G",
        help="source of the sampling defaults of requests: auto (temperature, top-p, top-k, min-p, repetition"
        " penalty and maximum new tokens from the model's generation_config.json or GGUF keys) or none (the"
        " engine's own defaults; vllm, vLLM's name for it, means the same)",
        brief="use the model's generation config as sampling defaults: auto or none",
    )
    max_model_len: int | None = option(
        None,
        Whole(1, _MANY),
        group=_MODEL,
        metavar="TOKENS",
        help="maximum tokens of prompt and output together (default: the model's limit)",
        brief="maximum tokens of prompt and output together (default: the model's)",
    )
    seed: int = option(
        0,
        Whole(-_SEED, _SEED - 1),
        group=_MODEL,
        metavar="N",
        help="seed for requests without one (default: 0)",
    )
    tensor_parallel_size: int = option(
        1,
        Whole(1, 64),
        group=_MODEL,
        short=("-tp",),
        metavar="N",
        help="split the model across N GPUs of this machine, or N CPU processes, which are started "
        "automatically (or by torchrun)",
        brief="split the model across N GPUs or processes",
    )
    """Number of ranks. Each is a process with its own device and a shard of every layer's heads and weights. With
    several ranks on GPUs, only decodes use CUDA graphs.
    """
    cpu_offload_gb: float = option(
        0.0,
        Gib(1 << 20),
        group=_MODEL,
        metavar="GIB",
        help="on a GPU: GiB of weights to keep in host memory (whole layers, from the last), copied to the GPU "
        "in each step, so that larger models fit; disables CUDA graphs (0: none)",
        brief="on a GPU: GiB of weights kept in host memory and copied in each step, for larger models (default: 0)",
    )
    enforce_eager: bool = option(
        False,
        Switch(),
        group=_MODEL,
        help="on a GPU: run every step without CUDA graphs (slower; starts sooner and takes less memory)",
        brief="on a GPU: run without CUDA graphs (slower; starts sooner and takes less memory)",
    )
    piecewise_graphs: bool | None = option(
        None,
        OnOff(),
        group=_MODEL,
        help="also run steps with up to 512 prefill tokens as CUDA graphs, attention excepted (default: on a GPU, "
        "without --enforce-eager and --sparse-decode, if enough memory is left for the KV cache)",
        brief="also run steps with up to 512 prefill tokens as CUDA graphs (default: on a GPU)",
    )
    attention_backend: str = option(
        "auto",
        OneOf(("auto", "kvscope", "flashinfer", "flash-attn"), _VLLM_BACKENDS),
        group=_MODEL,
        metavar="B",
        help="on a GPU: attention library for prompts; auto uses FlashInfer or flash-attn if it is installed, "
        "supports the model, and gives equal results faster in a test at the start; else kvscope's own kernels",
        brief="attention library for prompts on a GPU: auto (the fastest installed), kvscope, flashinfer or flash-attn",
    )
    """Attention library for prompts. Decodes, and layers that a library does not support, always use kvscope's
    kernels.
    """
    async_scheduling: bool | None = option(
        None,
        OnOff(),
        group=_MODEL,
        help="schedule and launch a step while the previous one runs; the tokens are the same (default: on a GPU)",
        brief="schedule and launch a step while the previous one runs (default: on a GPU)",
    )
    deterministic: bool = option(
        False,
        Switch(),
        group=_MODEL,
        help="make each request's results bit-identical, whatever other requests, prompt chunking and"
        " caching do, so that `kvscope replay` can compare runs; slower; fixes the number of CPU"
        " threads; on a GPU disables CUDA graphs and async scheduling; refused if it cannot be"
        " verified at the start",
        brief="make each request's results bit-identical, whatever other requests run (slower)",
    )
    fingerprints: bool = option(
        False,
        Switch(),
        group=_MODEL,
        help="with --deterministic: publish a hash of each layer's keys and values for each full block,"
        " and of each sampled token's logits, so that `kvscope replay` can compare runs",
        brief="with --deterministic: publish hashes of keys, values and logits, to compare runs",
    )
    num_threads: int | None = option(
        None,
        Whole(1, _MANY),
        group=_MODEL,
        metavar="N",
        help="fixed number of CPU threads (default: OMP_NUM_THREADS, or one per physical core available to this "
        "process; fewer while other programs compete for cores)",
        brief="fixed number of CPU threads (default: by the number of cores)",
    )
    block_size: int = option(
        16,
        Whole(1, 1024),
        group=_CACHE,
        metavar="SLOTS",
        help="tokens per block",
        brief="tokens per block (default: 16)",
    )
    kv_memory_bytes: int | None = option(
        None,
        Size(),
        group=_CACHE,
        flag="--kv-memory",
        metavar="SIZE",
        help="memory for the block pool, such as 512MiB (default: by device)",
        brief="memory for the blocks, such as 512MiB (default: by device)",
    )
    num_gpu_blocks_override: int | None = option(
        None,
        Whole(1, _MANY),
        group=_CACHE,
        metavar="BLOCKS",
        help="exact number of blocks, on a CPU too (default: as many as fit in memory)",
        brief="exact number of blocks, on a CPU too",
    )
    gpu_memory_utilization: float = option(
        0.9,
        PositiveShare(),
        group=_CACHE,
        metavar="SHARE",
        help="fraction of the GPU's memory that may be in use, other programs' included, above 0 and at most 1",
        brief="fraction of the GPU's memory to use (default: 0.9)",
    )
    kv_cache_dtype: str = option(
        "auto",
        OneOf(("auto", "fp8", "fp8_e4m3", "int8")),
        group=_CACHE,
        metavar="T",
        help="data type of the KV cache: that of the activations (auto), or 8 bits with a scale per token and "
        "KV head: e4m3 (fp8, also called fp8_e4m3) or int8",
        brief="data type of the KV cache: auto, fp8 (also called fp8_e4m3) or int8",
    )
    enable_prefix_caching: bool | None = option(
        None,
        OnOff(),
        group=_CACHE,
        help="reuse cached blocks for prompts with the same prefix (default: yes, where the allocator can share"
        " blocks)",
    )
    kv_events_config: KvEventsConfig | None = option(
        None,
        Json(parse_config),
        group=_CACHE,
        metavar="JSON",
        help="publish KV cache events as vLLM does, with vLLM's fields, such as '{\"enable_kv_cache_events\": "
        'true, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}\'; anyone who reaches '
        "these endpoints can read prompt tokens; engines with the same --seed give the same text the same "
        "hash (default: off)",
        brief="publish KV cache events as vLLM does, with vLLM's fields (default: off)",
    )
    page_heat: int = option(
        0,
        Whole(0, _MANY),
        group=_CACHE,
        metavar="STEPS",
        help="every STEPS decode steps, measure how each request's attention is distributed over its blocks, for the"
        " page map's Attention colours; 16 works well. Attention computes it in the same pass over the keys."
        " Blocks that a layer skips (sparse attention) count as 0 there (0: never measure)",
        brief="measure attention per block every N decode steps, for the page map (default: 0, never)",
    )
    sparse_decode: float | None = option(
        None,
        PositiveShare(),
        group=_CACHE,
        metavar="FRACTION",
        help="let each new token attend only to this fraction of its request's blocks, above 0 and at most"
        " 1 (default: all blocks): those with the highest attention, estimated per layer and KV head from the"
        " smallest and largest key values of each block (Quest). Prompts, the first two layers, sliding-window"
        " layers and requests of up to 256 tokens keep full attention. Answers change a little. The estimates need"
        " extra memory: 1/16 of the KV cache with blocks of 16 tokens, 1/8 if the cache has 8 bits",
        brief="fraction of a request's blocks that each new token attends to (default: all; 0.25 works well)",
    )
    allocator: str = option(
        "paged",
        OneOf(ENGINE_ALLOCATORS),
        group=_CACHE,
        metavar="A",
        help="how a request's blocks are placed: paged (anywhere), or contiguous, buddy or virtual"
        " (consecutive, without prefix cache)",
        brief="allocator: paged, contiguous, buddy or virtual",
    )
    host_kv_memory_bytes: int = option(
        0,
        Size(0),
        group=_TIERS,
        flag="--kv-host-memory",
        metavar="SIZE",
        help="host memory tier for preempted requests and evicted prefixes, such as 4GiB (default: none)",
        brief="host memory tier, such as 4GiB (default: none)",
    )
    disk_kv_memory_bytes: int = option(
        0,
        Size(0),
        group=_TIERS,
        flag="--kv-disk",
        metavar="SIZE",
        help="disk tier below host memory, such as 32GiB (default: none)",
        brief="disk tier, such as 32GiB (default: none)",
    )
    disk_kv_path: str | None = option(
        None,
        Text("a file"),
        group=_TIERS,
        flag="--kv-disk-path",
        metavar="FILE",
        help="file of the disk tier, on a fast drive (default: a temporary one)",
        brief="file of the disk tier (default: a temporary one)",
    )
    keep_disk_kv: bool = option(
        False,
        Switch(),
        group=_TIERS,
        flag="--kv-disk-keep",
        help="keep the disk tier's file at exit and reuse it at the next start with the same model",
        brief="keep the disk tier's file at exit, for the next start",
    )
    preemption: str = option(
        "auto",
        OneOf(PREEMPTIONS),
        group=_TIERS,
        metavar="HOW",
        help="how a preempted request continues: recompute its tokens, swap its blocks to host memory and"
        " back, or whichever was measured to be cheaper (auto)",
        brief="how a preempted request continues: auto, recompute or swap (default: auto)",
    )
    state_checkpoints: int | None = option(
        None,
        Whole(0, 1 << 16),
        group=_SCHEDULER,
        metavar="STATES",
        help="slots for saved states of recurrent layers at cached prefixes, in addition to one per request"
        " (default: as many as --max-num-seqs, within half of the KV memory)",
        brief="slots for states of recurrent layers at cached prefixes (default: as many as --max-num-seqs)",
    )
    state_interval: int = option(
        512,
        Whole(1, 1 << 24),
        group=_SCHEDULER,
        metavar="TOKENS",
        help="save the state of recurrent layers every TOKENS tokens (rounded up to whole blocks), as well"
        " as at the end of a text and where texts diverge",
        brief="tokens between saved states of recurrent layers (default: 512)",
    )
    max_num_seqs: int = option(
        64,
        Whole(1, 1 << 16),
        group=_SCHEDULER,
        metavar="REQUESTS",
        help="maximum requests per step",
        brief="maximum requests per step (default: 64)",
    )
    max_num_batched_tokens: int | None = option(
        None,
        Whole(1, _MANY),
        group=_SCHEDULER,
        metavar="TOKENS",
        help="maximum tokens computed per step; prefills are chunked to fit (default: by device)",
        brief="maximum tokens computed per step (default: by device)",
    )
    speculative_config: SpeculativeConfig | None = option(
        None,
        Json(parse_speculative_config),
        group=_SCHEDULER,
        metavar="JSON",
        help="speculate: draft tokens by n-gram lookup in the prompt and output, and verify several of them per step;"
        ' vLLM\'s fields, such as \'{"method": "ngram", "num_speculative_tokens": 5,'
        ' "prompt_lookup_max": 4, "prompt_lookup_min": 2}\'; the tokens stay the same;'
        " faster if answers repeat parts of their prompt (default: off)",
        brief="speculative decoding by n-gram lookup, with vLLM's fields; same tokens (default: off)",
    )
    lora_modules: tuple[LoraModule, ...] = option(
        (),
        Several(parse_lora_module, LORA_MODULE_FORMS),
        group=_LORA,
        metavar="NAME=FOLDER",
        help="LoRA adapters to load at the start, each a folder in PEFT's format; a request selects one by"
        ' its name, in the field `model`; JSON is also accepted: \'{"name": "sql", "path":'
        ' "adapters/sql"}\' (default: none)',
        brief="LoRA adapters to load at the start, each a folder in PEFT's format",
    )
    max_loras: int | None = option(
        None,
        Whole(1, 256),
        group=_LORA,
        metavar="N",
        help="maximum number of adapters per step, for which memory is reserved; requests for others wait"
        " (default: as many as --lora-modules names, at least 1)",
        brief="maximum number of adapters per step (default: as many as --lora-modules names)",
    )
    max_lora_rank: int = option(
        16,
        Whole(1, 512),
        group=_LORA,
        metavar="RANK",
        help="maximum rank of an adapter; every adapter needs the memory and time of this rank, even if its own is"
        " lower",
        brief="maximum rank of an adapter (default: 16)",
    )
    allow_runtime_lora_updating: bool = option(
        False,
        Switch(),
        group=_LORA,
        help="let operators load and unload adapters while the engine serves; they can then make the"
        " engine read any folder that it can access",
        brief="let operators load and unload adapters while the engine serves",
    )

    def __post_init__(self) -> None:
        check_options(self)
        self._check_allocator()
        self._check_tiers()
        if self.sparse_decode is not None:
            self._check_sparse()
        if self.tensor_parallel_size > 1:
            self._check_ranks()
        if self.deterministic:
            self._check_deterministic()
        elif self.fingerprints:
            raise BadInput(
                "fingerprints=True is not accepted without deterministic=True: the hashes would depend on the batch"
            )
        if self.publishes_kv_events and not self.prefix_caching:
            raise BadInput(
                "kv_events_config: enable_kv_cache_events=True is not accepted without prefix caching: without it "
                "there are no cached blocks to report"
            )

    @property
    def prefix_caching(self) -> bool:
        """Whether prompts with the same prefix share blocks. The default depends on the allocator."""
        return self.allocator == "paged" if self.enable_prefix_caching is None else self.enable_prefix_caching

    @property
    def max_drafts(self) -> int:
        return 0 if self.speculative_config is None else self.speculative_config.num_speculative_tokens

    @property
    def wants_piecewise_graphs(self) -> bool:
        """Whether a GPU runs steps with prefills as CUDA graphs, if its memory suffices."""
        return not self.enforce_eager and self.sparse_decode is None and self.piecewise_graphs is not False

    @property
    def has_lora(self) -> bool:
        return bool(self.lora_modules) or self.allow_runtime_lora_updating

    @property
    def num_lora_slots(self) -> int:
        return self.max_loras or max(1, len(self.lora_modules))

    @property
    def publishes_kv_events(self) -> bool:
        return self.kv_events_config is not None and self.kv_events_config.is_on

    def _check_allocator(self) -> None:
        if self.allocator != "paged" and self.enable_prefix_caching:
            raise BadInput(
                f"allocator={self.allocator!r} is not accepted with prefix caching: leave out --enable-prefix-caching"
            )
        if self.allocator != "paged" and self.speculative_config is not None:
            raise BadInput(
                f"allocator={self.allocator!r} is not accepted with speculation (--speculative-config): blocks of "
                "rejected drafts must be freed, which only `paged` can do"
            )

    def _check_ranks(self) -> None:
        """Refuse options that do not work with several ranks, mostly because a rank would act on its own shard only."""
        refused: tuple[tuple[str, object, object, str], ...] = (
            ("keep_disk_kv", self.keep_disk_kv, False, "each rank's file would have only its own part of each block"),
            (
                "quantization",
                self.quantization if self.quantization != "none" else "auto",
                "auto",
                "quantized weights cannot be split among ranks",
            ),
            ("cpu_offload_gb", self.cpu_offload_gb, 0, "offloaded weights can be copied to one device only"),
            (
                "piecewise_graphs",
                bool(self.piecewise_graphs),
                False,
                "with several ranks, only decodes run as CUDA graphs",
            ),
            (
                "attention_backend",
                self.attention_backend if self.attention_backend != "kvscope" else "auto",
                "auto",
                "each rank might choose another library",
            ),
            ("page_heat", self.page_heat, 0, "attention is measured only if one device has all heads"),
            (
                "allocator",
                self.allocator if self.allocator == "virtual" else "",
                "",
                "it maps pages on one device only",
            ),
        )
        for name, value, accepted, reason in refused:
            if value != accepted:
                size = self.tensor_parallel_size
                raise BadInput(f"{name}={value!r} is not accepted with tensor_parallel_size={size}: {reason}")

    def _check_deterministic(self) -> None:
        """Refuse options with which the order of summation may depend on the batch."""
        lora = "lora_modules" if self.lora_modules else "allow_runtime_lora_updating"
        refused: tuple[tuple[str, object, object, str], ...] = (
            ("tensor_parallel_size", self.tensor_parallel_size, 1, "the order of additions among ranks is not fixed"),
            ("cpu_offload_gb", self.cpu_offload_gb, 0, "all weights would be copied again for each tile of tokens"),
            ("piecewise_graphs", self.piecewise_graphs or None, None, "tiles of tokens run without CUDA graphs"),
            (
                "attention_backend",
                self.attention_backend if self.attention_backend != "kvscope" else "auto",
                "auto",
                "the libraries' order of additions depends on the batch",
            ),
            (
                "async_scheduling",
                self.async_scheduling or None,
                None,
                "the host divides each step into tiles of tokens",
            ),
            (
                "kv_cache_dtype",
                self.kv_cache_dtype,
                "auto",
                "the order of additions in attention over 8-bit blocks depends on the batch",
            ),
            ("keep_disk_kv", self.keep_disk_kv, False, "the file may have blocks that another engine computed"),
            ("sparse_decode", self.sparse_decode, None, "prompts use full attention, and new tokens do not"),
            (
                "page_heat",
                self.page_heat,
                0,
                "new tokens use the attention kernel for prompts, which does not measure it",
            ),
            (lora, self.has_lora, False, "all adapters of a step are computed together"),
        )
        for name, value, accepted, reason in refused:
            if value != accepted:
                raise BadInput(f"{name}={value!r} is not accepted with deterministic=True: {reason}")

    def _check_sparse(self) -> None:
        share = self.sparse_decode
        if self.piecewise_graphs:
            raise BadInput(
                f"sparse_decode={share!r} is not accepted with piecewise_graphs: piecewise graphs do not select blocks"
            )
        if self.speculative_config is not None:
            raise BadInput(
                f"sparse_decode={share!r} is not accepted with speculation (--speculative-config): drafts are checked"
                " with full attention, so the tokens would not be the same"
            )

    def _check_tiers(self) -> None:
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
