"""Loads a model by its name to a device, with kvscope's attention installed.

Decides the order of download, conversion, checks and loading. Must not depend on blocks or scheduling;
`layers.attention` computes attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from kvscope_engine.model.cpu_offload.resident_layer import ResidentLayers
from kvscope_engine.model.cpu_offload.split import GIB, check_streaming, layers_for_host, move_others
from kvscope_engine.model.device_memory.device_memory import CudaMemory, DeviceMemory
from kvscope_engine.model.device_memory.host_headroom import free_host_bytes
from kvscope_engine.model.device_memory.memory_plan import allowed_bytes, check_weights_fit
from kvscope_engine.model.device_memory.shortage_report import start_remedy
from kvscope_engine.model.distributed.rank import ALONE, Rank
from kvscope_engine.model.distributed.shard import check_divides, shard_model
from kvscope_engine.model.hf_config import (
    eos_token_ids,
    head_dim,
    num_kv_heads,
    num_query_heads,
    position_limit,
    read_config,
)
from kvscope_engine.model.layers.attention_interface import uses_interface
from kvscope_engine.model.loaded_model import LoadedModel
from kvscope_engine.model.loader.checkpoint import check_weights, load_weights
from kvscope_engine.model.loader.download.default_model import DEFAULT_GGUF_SHA256, default_gguf
from kvscope_engine.model.loader.download.hub import hub_folder
from kvscope_engine.model.loader.download.model_names import ModelName, parse_model_name
from kvscope_engine.model.loader.download.progress import Meter, ProgressCallback
from kvscope_engine.model.loader.download.quiet import quiet_kernel_advice
from kvscope_engine.model.loader.generation_config import model_sampling
from kvscope_engine.model.loader.gguf.gguf_blocks import attach_gguf, name_gguf
from kvscope_engine.model.loader.gguf.gguf_cache import converted_gguf, entry_folder
from kvscope_engine.model.loader.gguf.gguf_entries import is_intact
from kvscope_engine.model.loader.gguf.gguf_file import gguf_file
from kvscope_engine.model.loader.image_layers import image_layers
from kvscope_engine.model.loader.model_fingerprint import model_fingerprint
from kvscope_engine.model.loader.model_identity import model_identity
from kvscope_engine.model.loader.quantization_choice import (
    choose_quantization,
    option_of,
    quantization_label,
    stored_bits,
)
from kvscope_engine.model.loader.supported_models import Blueprint, blueprint, check_options_with_states
from kvscope_engine.model.loader.text_part import is_multimodal, make_model, text_config
from kvscope_engine.model.platforms.cpu_threads import default_num_threads
from kvscope_engine.model.platforms.device import choose_device, choose_dtype, device_notes, dtype_name, free_bytes
from kvscope_engine.model.platforms.host_allocator import limit_compiled_matmuls
from kvscope_engine.model.quantization.quantization_recipe import UNNAMED, Recipe, pop_recipe
from kvscope_engine.model.quantization.quantized_checkpoint import load_quantized
from kvscope_engine.model.quantization.scaled_weights import is_scaled
from kvscope_engine.model.quantization.stored_weight import name_format
from kvscope_engine.model.stored_tensor import StoredTensor, stored_tensors
from kvscope_engine.tokenization.tokenizer_files import load_tokenizer
from kvscope_kernels.cpu.compiler import must_build
from kvscope_kernels.cpu.library import library
from kvscope_telemetry.engine_config import EngineConfig
from kvscope_telemetry.errors import BadInput, KvscopeError
from kvscope_telemetry.messages.sampling_params import ModelSampling
from kvscope_telemetry.messages.telemetry import ModelInfo, Progress

if TYPE_CHECKING:
    from transformers import PretrainedConfig

BATCH_DEPENDENT: Final = ("dynamic", "longrope")


def load_model(
    config: EngineConfig,
    progress: ProgressCallback,
    rank: Rank = ALONE,
    await_turn: Callable[[torch.device], object] = lambda device: None,
) -> LoadedModel:
    """Find, download, convert and load `config.model`, or its shard for `rank`. Downloads and conversions that an
    earlier start of the engine completed are not repeated.

    Args:
        await_turn: Called when the model's files are local, before memory is checked.

    Raises:
        BadInput: The model is not supported.
        KvscopeError: An external obstacle, such as no network or not enough memory.

    Errors are one line that names the model. After an error, nothing of the model is left in memory.
    """
    name = parse_model_name(config.model)
    device = choose_device(config.device)
    if config.cpu_offload_gb:
        check_streaming(config.cpu_offload_gb, device, free_host_bytes())
    if device.type == "cpu":
        quiet_kernel_advice()
        limit_compiled_matmuls()
        _compile_operations(progress)
    dtype = choose_dtype(config.dtype, device)
    try:
        return _load(config, name, device, dtype, progress, rank, await_turn)
    except (torch.OutOfMemoryError, MemoryError) as error:
        holders = CudaMemory(device).holders.describe() if device.type == "cuda" else ""
        raise KvscopeError(
            f"no memory on {device} for model {name.text!r} in {dtype_name(dtype)}:"
            f" {start_remedy(holders, on_gpu=device.type == 'cuda')}"
        ) from error


def _compile_operations(progress: ProgressCallback) -> None:
    """Compile the C operations if necessary. Their first use would compile them too, but without reporting progress."""
    if must_build():
        progress(Progress(stage="compile"))
        library()


def _load(
    config: EngineConfig,
    name: ModelName,
    device: torch.device,
    dtype: torch.dtype,
    progress: ProgressCallback,
    rank: Rank,
    await_turn: Callable[[torch.device], object],
) -> LoadedModel:
    folder, config_file = _files(name, dtype, progress)
    full_config = read_config(config_file)
    recipe = pop_recipe(full_config, name.text)
    plan = blueprint(full_config, name.text)
    check_options_with_states(config, plan, name.text)
    hf_config = text_config(full_config)
    max_model_len = resolve_max_model_len(hf_config, config.max_model_len, name.text)
    _check_divisible_by_ranks(hf_config, rank, name)
    await_turn(device)
    _check_memory(plan, name, dtype, device, config)
    file = gguf_file(name)
    sampling = model_sampling(config.generation_config, folder, file)
    quantization = choose_quantization(config, device, dtype, recipe, file)
    notes: list[str] = []
    identity, is_whole = "", rank.is_alone and not config.cpu_offload_gb
    source = device if is_whole else torch.device("cpu")  # files are memory-mapped there: only what is kept is read
    if name.kind == "dummy":
        module = random_model(full_config, dtype, source, config.seed, progress)
    else:
        load_args = folder, full_config, dtype, source, name.text, progress
        weights_files = check_weights(folder)
        module, notes = _module(weights_files, recipe, quantization, load_args)
        if is_whole and device.type == "cpu":
            class_file = Path(inspect.getfile(type(module)))
            files = [config_file, *weights_files, *([] if file is None else [file.path]), class_file]
            identity = model_identity(files, dtype, quantization, config.num_threads or default_num_threads())
    shardings = shard_model(module, rank, name.text)
    if not rank.is_alone:
        module.to(device)
    if config.cpu_offload_gb:
        _keep_on_host(module, config.cpu_offload_gb, device)
    if recipe is None and file is not None:
        (name_gguf if quantization == "none" else attach_gguf)(module, file)
    _make_ready(module)
    return LoadedModel(
        module=module,
        hf_config=module.config,  # type: ignore[arg-type]
        tokenizer=load_tokenizer(folder),
        info=_info(
            name,
            plan,
            text_config(module.config),
            dtype,
            max_model_len,
            (quantization_label(quantization, device, stored_bits(recipe, file)), option_of(quantization), sampling),
        ),
        eos_token_ids=eos_token_ids(folder, full_config) or eos_token_ids(folder, hf_config),
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        quantization=quantization,
        notes=(*(device_notes(config.device, device) if rank.index == 0 else ()), *notes),
        fingerprint=model_fingerprint(module) if config.keep_disk_kv else "",
        identity=identity,
        rank=rank,
        shardings=shardings,
    )


def _module(
    files: list[Path],
    recipe: Recipe | None,
    quantization: str,
    load_args: tuple[Path, Any, torch.dtype, torch.device, str, ProgressCallback],
) -> tuple[torch.nn.Module, list[str]]:
    """Load the checkpoint in `files`. `load_args` are the arguments of `load_weights`.

    Returns the model and messages for the user.
    """
    folder, full_config, dtype = load_args[:3]
    stored = stored_tensors(files)
    recipe = recipe or (UNNAMED if is_scaled(stored) else None)
    notes: list[str] = []
    if recipe is not None:
        build = partial(load_weights, *load_args)
        module, note = load_quantized(folder, stored, recipe, dtype, build, keeps_stored=quantization != "none")
        name_format(module, recipe.format)
        widened_note = f"weights come as {recipe} and are widened to {dtype_name(dtype)}"
        notes = [line for line in (note, widened_note if quantization == "none" else "") if line]
    else:
        module = load_weights(*load_args, stored if is_multimodal(full_config) else None)
    return module, [*notes, *([_unread_note(full_config, stored)] if is_multimodal(full_config) else [])]


def _unread_note(config: Any, stored: dict[str, StoredTensor]) -> str:
    num_unread_bytes = sum(tensor.num_bytes for tensor in stored.values() if not tensor.was_read)
    num_bytes = sum(tensor.num_bytes for tensor in stored.values())
    text, num_image_layers = text_config(config), len(image_layers(text_config(config)))
    layers = f"; {num_image_layers} of its {text.num_hidden_layers} layers read images and are not run" * bool(
        num_image_layers
    )
    return (
        f"{config.model_type} reads more than text: its text part is served, and {num_unread_bytes / 1e9:.2f} of its"
        f" {num_bytes / 1e9:.2f} GB of weights, which see or hear, are not read{layers}"
    )


def _keep_on_host(module: torch.nn.Module, cpu_offload_gb: float, device: torch.device) -> None:
    layers = layers_for_host(module, cpu_offload_gb)
    move_others(module, layers, device)
    module.kvscope_resident = ResidentLayers(layers, device)  # type: ignore[assignment]


def _check_divisible_by_ranks(hf_config: PretrainedConfig, rank: Rank, name: ModelName) -> None:
    """Raise BadInput, before weights are read, if the model can't be sharded over the ranks.

    Sizes that the configuration does not state are checked when the layers exist.
    """
    rows = getattr(hf_config, "intermediate_size", None)
    heads = num_query_heads(hf_config), num_kv_heads(hf_config)
    check_divides(rank.count, *heads, rows if isinstance(rows, int) else rank.count, name.text)


def _files(name: ModelName, dtype: torch.dtype, progress: ProgressCallback) -> tuple[Path, Path]:
    if name.kind == "dummy":
        return name.path.parent, name.path
    if name.kind == "folder":
        folder = name.path
    elif name.kind == "hub":
        folder = hub_folder(name.text, progress)
    elif name.kind == "gguf":
        folder = converted_gguf(name.path, dtype, progress)
    else:
        folder = _default_folder(dtype, progress)
    return folder, folder / "config.json"


def _default_folder(dtype: torch.dtype, progress: ProgressCallback) -> Path:
    """Return the folder of the converted default model, downloading the source file only if it is not converted yet."""
    entry = entry_folder(DEFAULT_GGUF_SHA256, dtype)
    return entry if is_intact(entry) else converted_gguf(default_gguf(progress), dtype, progress)


def _check_memory(
    plan: Blueprint, name: ModelName, dtype: torch.dtype, device: torch.device, config: EngineConfig
) -> None:
    if device.type == "cuda":
        _check_gpu_memory(plan, name, dtype, CudaMemory(device), config)
        return
    needed, free = plan.num_parameters * dtype.itemsize, free_bytes(device)
    if needed > free:
        raise KvscopeError(
            f"no memory for model {name.text!r}: its weights in {dtype_name(dtype)} take {needed / 1e9:.1f} GB,"
            f" {free / 1e9:.1f} GB are free on {device}"
        )


def _check_gpu_memory(
    plan: Blueprint, name: ModelName, dtype: torch.dtype, memory: DeviceMemory, config: EngineConfig
) -> None:
    """Check that the weights fit in the engine's share of the GPU's memory, less the memory of other processes.

    If the size of the KV cache is given, weights may take all free memory.
    """
    total, free = memory.total_bytes, memory.free_bytes()
    is_sized = config.kv_memory_bytes is not None or config.num_gpu_blocks_override is not None
    allowed = allowed_bytes(total, config.gpu_memory_utilization, draws_display=memory.draws_display())
    headroom = free if is_sized else min(free, allowed - (total - free) - memory.promised_bytes())
    share = plan.num_parameters // config.tensor_parallel_size
    on_host = round(config.cpu_offload_gb * GIB) if config.tensor_parallel_size == 1 else None
    spare, holders = max(headroom, 0), memory.holders.describe
    check_weights_fit(name.text, share, dtype.itemsize, spare, total, "the GPU", on_host, holders)


def _make_ready(module: torch.nn.Module) -> None:
    """Switch the model to evaluation mode and install kvscope's attention. Raises KvscopeError if transformers
    did not accept that attention.
    """
    from kvscope_engine.model.layers.attention.paged_attention import ATTENTION_NAME, register_attention

    freeze_rope(module)
    module.requires_grad_(False).eval()
    register_attention()
    if not any(uses_interface(type(part)) for part in module.modules()):
        return
    module.set_attn_implementation(ATTENTION_NAME)  # type: ignore[operator]
    used = module.config._attn_implementation  # type: ignore[union-attr]
    if used != ATTENTION_NAME:
        raise KvscopeError(f"{type(module).__name__} kept its own attention, {used!r}")


def _info(
    name: ModelName,
    plan: Blueprint,
    hf_config: PretrainedConfig,
    dtype: torch.dtype,
    max_model_len: int,
    quantization_and_sampling: tuple[str, str, ModelSampling],
) -> ModelInfo:
    """Describe the model to clients.

    `quantization_and_sampling`: quantization label, `--quantization` value, and default sampling options.
    """
    return ModelInfo(
        name=name.text,
        architecture=plan.architecture,
        dtype=dtype_name(dtype),
        num_layers=int(hf_config.num_hidden_layers),
        num_query_heads=num_query_heads(hf_config),
        num_kv_heads=num_kv_heads(hf_config),
        head_dim=head_dim(hf_config),
        vocab_size=int(hf_config.vocab_size),
        num_parameters=plan.num_parameters,
        max_model_len=max_model_len,
        quantization=quantization_and_sampling[0],
        quantization_option=quantization_and_sampling[1],
        sampling=quantization_and_sampling[2],
    )


def random_model(
    hf_config: Any, dtype: torch.dtype, device: torch.device, seed: int, progress: ProgressCallback
) -> torch.nn.Module:
    """Create a model with random weights from a configuration, for benchmarks and tests.

    Returns the causal language model of `hf_config`, on `device` in `dtype`. Equal seeds give equal weights.
    """
    with Meter(progress, "load", "random weights"), torch.random.fork_rng(_devices(device)), device:
        torch.manual_seed(seed)
        return make_model(hf_config, dtype)


def _devices(device: torch.device) -> list[int]:
    return [torch.cuda.current_device()] if device.type == "cuda" else []


# Context length allowed by the rotary embedding, which must be the same for all requests of a batch.
#
# Rotary embeddings of type `dynamic` and `longrope` depend on the longest sequence of the batch: a request's tokens
# would depend on concurrent requests, and each step would wait for the device. Below their first limit they are
# constant, so the context is limited to that, and the dependence is switched off (`freeze_rope`).
def resolve_max_model_len(config: Any, requested: int | None, name: str) -> int:
    """Return the maximum number of tokens of prompt and output: `requested`, or the model's maximum if that is None.

    Raises BadInput if `requested` is more than the model supports, or the model does not state a maximum.
    """
    limit, reason = _limit(config)
    if limit is None and requested is None:
        raise BadInput(f"model {name!r} does not state its context length: give max_model_len")
    if limit is not None and requested is not None and requested > limit:
        raise BadInput(f"max_model_len={requested} is not accepted: model {name!r} can do {limit}{reason}")
    length = requested or limit
    assert length is not None, "one of them is given"
    return length


def freeze_rope(model: torch.nn.Module) -> None:
    """Make rotary embeddings independent of the batch. Call it after `resolve_max_model_len`."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str) and _is_batch_dependent(kinds):
            module.rope_type = "default"  # type: ignore[assignment]
        elif isinstance(kinds, dict):
            kinds |= {key: "default" for key, kind in kinds.items() if _is_batch_dependent(kind)}


def _limit(config: Any) -> tuple[int | None, str]:
    limit = position_limit(config)
    for parameters in _rope_parameters(config):
        kind = str(parameters.get("rope_type", "default"))
        if not _is_batch_dependent(kind):
            continue
        original = parameters.get("original_max_position_embeddings")
        if kind == "longrope" and original is None:
            original = getattr(config, "original_max_position_embeddings", None)
        bounds = [value for value in (limit, original) if isinstance(value, int)]
        return min(bounds, default=None), f" with its rotary embedding of type {kind!r}"
    return limit, ""


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """Return the model's `rope_parameters`: one dict, or one per kind of layer if they differ."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if "rope_type" in parameters:
        return [parameters]
    return [value for value in parameters.values() if isinstance(value, dict)]


def _is_batch_dependent(kind: str) -> bool:
    return any(name in kind for name in BATCH_DEPENDENT)
