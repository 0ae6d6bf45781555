"""One GGUF file to a folder with safetensors, through transformers' own GGUF loader. Slow, so done once."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from kvscope_engine.model.fetching.progress import ProgressCallback
from kvscope_engine.model.fetching.quiet import quiet_gguf, quiet_transformers
from kvscope_engine.model.gguf.config import config_of
from kvscope_engine.model.gguf.header import GgufHeader, check_gguf
from kvscope_engine.model.gguf.tensors import check_used, watched_tensors
from kvscope_engine.model.loading.checkpoint import check_report, load_weights
from kvscope_engine.model.loading.device import dtype_name
from kvscope_engine.model.loading.hf_config import read_config
from kvscope_engine.model.loading.shortage import is_no_memory
from kvscope_engine.model.loading.support import blueprint
from kvscope_engine.model.text.tokenizer_files import save_tokenizer
from kvscope_telemetry.errors import BadInput, KvscopeError


def convert_gguf(gguf: Path, dtype: torch.dtype, folder: Path, progress: ProgressCallback) -> None:
    """Write config, weights in `dtype` and tokenizer of `gguf` into `folder`.

    Raises BadInput when the file is damaged, or holds a model that cannot be served.
    """
    header = check_gguf(gguf)
    source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True, "trust_remote_code": False}
    try:
        model, tokenizer = _read(gguf, header, dtype, source, progress)
    except BadInput as error:
        raise BadInput(f"{gguf} cannot be converted: {error}") from error
    except Exception as error:  # a foreign file: transformers raises nearly anything
        if is_no_memory(error):
            raise KvscopeError(f"no memory to convert {gguf} to {dtype_name(dtype)}: close other programs") from error
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadInput(f"{gguf} cannot be converted: {line:.200}") from error
    # Dequantized, it is an ordinary model; transformers refuses to write it while it says where it is from.
    model.hf_quantizer = None
    model.config.__dict__.pop("quantization_config", None)
    blueprint(model.config, gguf.name)
    _save(model, dtype, folder, gguf.name, progress)
    save_tokenizer(tokenizer, folder)


def _read(
    gguf: Path, header: GgufHeader, dtype: torch.dtype, source: dict[str, Any], progress: ProgressCallback
) -> tuple[Any, Any]:
    """The model and its tokenizer, with all that the file says in them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    auto: Any = AutoModelForCausalLM
    with quiet_gguf(progress, gguf.name), watched_tensors() as used:
        config = config_of(gguf, header)
        model, report = auto.from_pretrained(
            gguf.parent, config=config, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **source
        )
        check_report(gguf, report)
        check_used(header, used)
        return model, AutoTokenizer.from_pretrained(gguf.parent, **source)


def recast(entry: Path, dtype: torch.dtype, folder: Path, detail: str, progress: ProgressCallback) -> None:
    """Write the converted float32 model in the folder `entry` into `folder` in `dtype`: the same, but sooner."""
    model = load_weights(entry, read_config(entry / "config.json"), dtype, torch.device("cpu"), detail, progress)
    for path in entry.iterdir():
        if path.suffix != ".safetensors":
            shutil.copyfile(path, folder / path.name)
    _save(model, dtype, folder, detail, progress)


def _save(model: Any, dtype: torch.dtype, folder: Path, detail: str, progress: ProgressCallback) -> None:
    with quiet_transformers(progress, "convert", f"{detail}, writing {dtype_name(dtype)}", "files"):
        try:
            model.save_pretrained(folder, max_shard_size="1TB")
        except SafetensorError as error:  # what the file system said, in other words
            raise OSError(_file_system_reason(str(error))) from error


def _file_system_reason(text: str) -> str:
    """`No space left on device` out of `Error while serializing: I/O error: No space left on device (os error 28)`."""
    number = re.search(r"os error (\d+)", text)
    return os.strerror(int(number[1])) if number else text
