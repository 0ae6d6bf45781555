"""One GGUF file to a folder with safetensors, through transformers' own GGUF loader. Slow, so done once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from kvscope_engine.model.fetching.progress import ProgressCallback
from kvscope_engine.model.fetching.quiet import quiet_gguf, quiet_transformers
from kvscope_engine.model.gguf.header import check_gguf
from kvscope_engine.model.loading.checkpoint import check_report, load_weights
from kvscope_engine.model.loading.device import dtype_name
from kvscope_engine.model.loading.hf_config import read_config
from kvscope_engine.model.loading.support import blueprint
from kvscope_engine.model.text.tokenizer_files import save_tokenizer
from kvscope_telemetry.errors import BadInput


def convert_gguf(gguf: Path, dtype: torch.dtype, folder: Path, progress: ProgressCallback) -> None:
    """Write config, weights in `dtype` and tokenizer of `gguf` into `folder`.

    Raises BadInput when the file is damaged, or holds a model that cannot be served.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    auto: Any = AutoModelForCausalLM
    check_gguf(gguf)
    source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True, "trust_remote_code": False}
    try:
        with quiet_gguf(progress, gguf.name):
            model, report = auto.from_pretrained(
                gguf.parent, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **source
            )
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
    except Exception as error:  # a foreign file: transformers raises nearly anything
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadInput(f"{gguf} cannot be converted: {line:.200}") from error
    check_report(gguf, report)
    # Dequantized, it is an ordinary model; transformers refuses to write it while it says where it is from.
    model.hf_quantizer = None
    model.config.__dict__.pop("quantization_config", None)
    blueprint(model.config, gguf.name)
    _save(model, dtype, folder, gguf.name, progress)
    save_tokenizer(tokenizer, folder)


def recast(entry: Path, dtype: torch.dtype, folder: Path, detail: str, progress: ProgressCallback) -> None:
    """Write the converted float32 model in the folder `entry` into `folder` in `dtype`: the same, but sooner."""
    model = load_weights(entry, read_config(entry / "config.json"), dtype, torch.device("cpu"), detail, progress)
    for path in entry.iterdir():
        if path.suffix != ".safetensors":
            shutil.copyfile(path, folder / path.name)
    _save(model, dtype, folder, detail, progress)


def _save(model: Any, dtype: torch.dtype, folder: Path, detail: str, progress: ProgressCallback) -> None:
    with quiet_transformers(progress, "convert", f"{detail}, writing {dtype_name(dtype)}", "files"):
        model.save_pretrained(folder, max_shard_size="1TB")
