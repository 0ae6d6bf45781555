"""Reads and checks the configuration and weights in a model folder with Hugging Face's layout.

Weights must be safetensors: nothing is unpickled, and no code from a model folder is run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch

from kvscope_engine.json_file import read_json
from kvscope_engine.model.device_memory.out_of_memory import is_out_of_memory
from kvscope_engine.model.loader.download.progress import ProgressCallback
from kvscope_engine.model.loader.download.quiet import quiet_transformers
from kvscope_engine.model.loader.text_part import extract_text_part, loading_class, reading_config
from kvscope_engine.model.stored_tensor import ComputedTensor
from kvscope_telemetry.errors import BadInput, KvscopeError

CONFIG_FILE: Final = "config.json"
WEIGHTS_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"


def check_weights(folder: Path) -> list[Path]:
    """Return the paths of the folder's safetensors files. Raises BadInput unless all exist and are complete."""
    index = folder / INDEX_FILE
    names = _shards(index) if index.is_file() else [WEIGHTS_FILE]
    if names == [WEIGHTS_FILE] and not (folder / WEIGHTS_FILE).is_file():
        other = next(folder.glob("*.bin"), None)
        hint = f" ({other.name} is not read: only safetensors are)" if other else ""
        raise BadInput(f"{str(folder)!r} has no weights: {WEIGHTS_FILE} or {INDEX_FILE} is needed{hint}")
    for name in names:
        _check_safetensors(folder / name)
    return [folder / name for name in names]


def load_weights(
    folder: Path,
    hf_config: Any,
    dtype: torch.dtype,
    device: torch.device,
    detail: str,
    progress: ProgressCallback,
    tensors: Mapping[str, Any] | None = None,
) -> torch.nn.Module:
    """Load the causal language model in `folder`. On a CPU, weights in the dtype of the files are memory-mapped.

    Args:
        detail: Name of the model in progress reports.
        tensors: Weights by name, if they differ from those in the files. Values are tensors, or objects whose `[...]`
            returns a tensor.

    Raises:
        BadInput: Weights are missing, or their shapes do not match the configuration.
    """
    has_computed = any(isinstance(tensor, ComputedTensor) for tensor in (tensors or {}).values())
    try:
        with (
            quiet_transformers(progress, "load", detail),
            separate_weight_segments(),
            _loading_one_by_one(has_computed),
        ):
            model, report = loading_class(hf_config).from_pretrained(
                folder if tensors is None else None,
                config=reading_config(hf_config),
                state_dict=tensors,
                dtype=dtype,
                attn_implementation="eager",
                device_map={"": device} if device.type == "cuda" else None,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    except Exception as error:  # an external file: transformers raises nearly anything
        if is_out_of_memory(error):
            raise MemoryError(str(error)) from error
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadInput(f"the model in {str(folder)!r} cannot be loaded: {line:.200}") from error
    check_report(folder, report)
    return extract_text_part(model, hf_config)


@contextmanager
def separate_weight_segments() -> Iterator[None]:
    """Return a context in which each weight on a GPU is allocated in a separate memory segment.

    Otherwise transformers first allocates one block as large as the model, which torch's allocator splits. When fusing
    later frees weights, the holes could neither be used for anything larger nor be returned to the driver.
    """
    from transformers import modeling_utils

    with patch.object(modeling_utils, "caching_allocator_warmup", _skip_allocator_warmup, create=True):
        yield


@contextmanager
def _loading_one_by_one(is_enabled: bool) -> Iterator[None]:
    """Return a context in which, if `is_enabled`, transformers requests one tensor at a time instead of many in
    advance.

    While a tensor is dequantized, it takes several times its final size.
    """
    with patch.dict(os.environ, {"HF_DEACTIVATE_ASYNC_LOAD": "1"} if is_enabled else {}):
        yield


def _skip_allocator_warmup(*_: Any, **__: Any) -> None:
    """Replace transformers' warm-up of the allocator, which loading does not need."""


def check_report(source: Path, report: dict[str, Any]) -> None:
    """Raise BadInput if transformers did not find every weight, with the right shape, in `source`."""
    missing, mismatched = sorted(report["missing_keys"]), sorted(report["mismatched_keys"])
    if missing:
        raise BadInput(f"{str(source)!r} lacks {len(missing)} weights of its model, {missing[0]} for one")
    if mismatched:
        name, actual, expected = mismatched[0]
        raise BadInput(
            f"{str(source)!r} has {len(mismatched)} weights of a wrong shape: {name} is {list(actual)},"
            f" its configuration says {list(expected)}"
        )


def _shards(index: Path) -> list[str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadInput(f"{index} is not accepted: it has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise BadInput(f"{index} is not accepted: {name!r} is not the name of a file beside it")
    return names


def _check_safetensors(path: Path) -> None:
    from safetensors import safe_open

    if not path.is_file():
        raise BadInput(f"{path} is missing: {INDEX_FILE} asks for it")
    try:
        with safe_open(path, framework="pt"):
            return
    except Exception as error:  # SafetensorError, or any error due to a broken header
        if is_out_of_memory(error):
            raise KvscopeError(f"no memory to read {path}: close other programs, or use a smaller model") from error
        if isinstance(error, OSError):
            raise BadInput(f"cannot read {path}: {error.strerror or error}") from error
        raise BadInput(f"{path} is damaged or cut short: {error!s:.120}") from error
