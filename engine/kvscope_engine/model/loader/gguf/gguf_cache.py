"""Cache of converted GGUF files: one entry per content and dtype, verified before use."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from kvscope_engine.cache_folder import file_lock, replace_folder, scratch_folder
from kvscope_engine.model.device_memory.out_of_memory import is_out_of_memory
from kvscope_engine.model.hf_config import read_config
from kvscope_engine.model.loader.checkpoint import check_report, load_weights
from kvscope_engine.model.loader.download.progress import ProgressCallback
from kvscope_engine.model.loader.download.quiet import quiet_gguf, quiet_transformers
from kvscope_engine.model.loader.gguf.end_tokens import end_token_ids
from kvscope_engine.model.loader.gguf.gguf_config import config_of
from kvscope_engine.model.loader.gguf.gguf_entries import MANIFEST, content_sha256, entry_of, fingerprint, is_intact
from kvscope_engine.model.loader.gguf.gguf_header import GgufHeader, check_gguf
from kvscope_engine.model.loader.gguf.pre_tokenizer import apply_pre_tokenizer, check_pre_tokenizer
from kvscope_engine.model.loader.gguf.split_files import reading_all_parts
from kvscope_engine.model.loader.gguf.used_tensors import check_used, watched_tensors
from kvscope_engine.model.loader.supported_models import blueprint
from kvscope_engine.model.platforms.device import dtype_name
from kvscope_engine.tokenization.tokenizer_files import save_tokenizer
from kvscope_telemetry.errors import BadInput, KvscopeError


def converted_gguf(gguf: Path, dtype: torch.dtype, progress: ProgressCallback) -> Path:
    """Return the folder with the weights of `gguf` in `dtype`, converting the file if the entry is missing or damaged.

    Safe for concurrent processes: one converts, the others wait. Raises BadInput if the file cannot be converted.
    """
    sha256 = content_sha256(gguf)
    entry = entry_folder(sha256, dtype)
    if is_intact(entry):
        return entry
    with file_lock(entry):
        if not is_intact(entry):
            _build(gguf, dtype, sha256, progress)
    return entry


def entry_folder(sha256: str, dtype: torch.dtype) -> Path:
    return entry_of(sha256, dtype_name(dtype))


def _build(gguf: Path, dtype: torch.dtype, sha256: str, progress: ProgressCallback) -> None:
    entry = entry_folder(sha256, dtype)
    try:
        with scratch_folder(entry.parent) as scratch:
            folder = scratch / entry.name
            folder.mkdir()
            _fill(gguf, dtype, sha256, folder, progress)
            manifest = {path.name: fingerprint(path) for path in sorted(folder.iterdir()) if path.name != MANIFEST}
            (folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
            replace_folder(folder, entry)
    except OSError as error:
        reason = error.strerror or error
        raise KvscopeError(
            f"cannot write the converted model to {str(entry)!r}: {reason}; free space on this disk, fix the folder's "
            "permissions, or set KVSCOPE_CACHE to another folder"
        ) from error


def _fill(gguf: Path, dtype: torch.dtype, sha256: str, folder: Path, progress: ProgressCallback) -> None:
    float32_entry = entry_folder(sha256, torch.float32)
    if dtype != torch.float32 and is_intact(float32_entry):
        recast(float32_entry, dtype, folder, gguf.name, progress)
    else:
        convert_gguf(gguf, dtype, folder, progress)


def convert_gguf(gguf: Path, dtype: torch.dtype, folder: Path, progress: ProgressCallback) -> None:
    """Write config, weights in `dtype` and tokenizer of `gguf` into `folder`, as safetensors.

    Uses transformers' own GGUF loader, which is slow, so it is called once per file and dtype.

    Raises BadInput if the file is damaged, or holds an unsupported model.
    """
    header = check_gguf(gguf)
    try:
        check_pre_tokenizer(header)
    except BadInput as error:
        raise BadInput(f"{gguf} cannot be converted: {error}") from error
    source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True, "trust_remote_code": False}
    try:
        model, tokenizer = _load_model(gguf, header, dtype, source, progress)
    except BadInput as error:
        raise BadInput(f"{gguf} cannot be converted: {error}") from error
    except Exception as error:  # an external file: transformers raises nearly anything
        if is_out_of_memory(error):
            raise KvscopeError(
                f"not enough memory to convert {gguf} to {dtype_name(dtype)}: close other programs"
            ) from error
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadInput(f"{gguf} cannot be converted: {line:.200}") from error
    # transformers refuses to save a model that is marked as quantized, although it is dequantized now.
    model.hf_quantizer = None
    model.config.__dict__.pop("quantization_config", None)
    blueprint(model.config, gguf.name)
    _save(model, dtype, folder, gguf.name, progress)
    save_tokenizer(tokenizer, folder)


def _load_model(
    gguf: Path, header: GgufHeader, dtype: torch.dtype, source: dict[str, Any], progress: ProgressCallback
) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    auto: Any = AutoModelForCausalLM
    with quiet_gguf(progress, gguf.name), reading_all_parts(), watched_tensors() as used:
        config = config_of(gguf, header)
        model, report = auto.from_pretrained(
            gguf.parent, config=config, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **source
        )
        check_report(gguf, report)
        check_used(header, used)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
    apply_pre_tokenizer(tokenizer, header)
    ends = set(end_token_ids(header, tokenizer))
    config_ids = model.config.eos_token_id
    ends |= set(config_ids if isinstance(config_ids, list) else [] if config_ids is None else [config_ids])
    model.config.eos_token_id = model.generation_config.eos_token_id = sorted(ends) or None
    return model, tokenizer


def recast(entry: Path, dtype: torch.dtype, folder: Path, detail: str, progress: ProgressCallback) -> None:
    """Write the converted float32 model in `entry` to `folder` in `dtype`: the same result as a conversion, but
    faster."""
    model = load_weights(entry, read_config(entry / "config.json"), dtype, torch.device("cpu"), detail, progress)
    for path in entry.iterdir():
        if path.suffix != ".safetensors":
            shutil.copyfile(path, folder / path.name)
    _save(model, dtype, folder, detail, progress)


def _save(model: Any, dtype: torch.dtype, folder: Path, detail: str, progress: ProgressCallback) -> None:
    with quiet_transformers(progress, "convert", f"{detail}, writing {dtype_name(dtype)}", "files"):
        try:
            model.save_pretrained(folder, max_shard_size="1TB")
        except SafetensorError as error:  # wraps an error of the file system
            raise OSError(_file_system_reason(str(error))) from error


def _file_system_reason(text: str) -> str:
    """Extract the reason from "Error while serializing: I/O error: No space left on device (os error 28)"."""
    number = re.search(r"os error (\d+)", text)
    return os.strerror(int(number[1])) if number else text
