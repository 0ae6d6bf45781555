"""Reads LoRA adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`.

Decides which adapters are accepted: one that does more than add B A to linear layers is refused, naming the feature.
Must not depend on the model; `lora_adapters` checks that the layers exist. Sources: Hu et al., LoRA: Low-rank
adaptation of large language models, 2021; Kalajdzievski, A rank stabilization scaling factor, 2023 (rsLoRA's scale).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import torch

from kvscope_telemetry.errors import BadInput

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
MAX_CONFIG_BYTES: Final = 1 << 20
MAX_WEIGHTS_BYTES: Final = 8 << 30
_PREFIX: Final = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
_BASE_CHANGING_INITS: Final = ("pissa", "olora", "loftq", "corda", "lora_ga")
"""Prefixes of PEFT's `init_lora_weights` whose initialization also changes the base weights."""
_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


class Delta(NamedTuple):
    """An adapter's update of a linear layer, which adds x @ a.T @ b.T to the result."""

    a: torch.Tensor
    """Shape (rank, inputs)."""
    b: torch.Tensor
    """Shape (outputs, rank), multiplied by the adapter's scale."""


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """Weights of an adapter, by the layer names of the model."""

    deltas: dict[str, Delta]
    rank: int
    """Largest rank over the adapter's layers."""
    key: bytes
    """Hash of the adapter's name, scale and weights, as in `Adapter`."""

    @property
    def num_bytes(self) -> int:
        return sum(delta.a.nbytes + delta.b.nbytes for delta in self.deltas.values())


class _Config(msgspec.Struct, frozen=True):
    """Fields of PEFT's configuration that affect the result of an adapter."""

    r: int
    lora_alpha: float
    peft_type: str = "LORA"
    use_rslora: bool = False
    use_dora: bool = False
    use_qalora: bool = False
    bias: str = "none"
    lora_bias: bool = False
    init_lora_weights: Any = True
    alpha_pattern: Any = None
    modules_to_save: Any = None
    target_parameters: Any = None
    trainable_token_indices: Any = None
    layer_replication: Any = None
    alora_invocation_tokens: Any = None

    def fault(self) -> str:
        """Return a message about the first unsupported feature that the adapter uses; empty if there is none."""
        if self.peft_type != "LORA":
            return f"peft_type={self.peft_type!r:.40} is not accepted: LORA"
        if self.bias != "none":
            return f"bias={self.bias!r:.40} is not accepted: none"
        for name in ("use_dora", "use_qalora", "lora_bias"):
            if getattr(self, name):
                return f"{name}=true is not accepted"
        for name in (
            "alpha_pattern",
            "modules_to_save",
            "target_parameters",
            "trainable_token_indices",
            "layer_replication",
            "alora_invocation_tokens",
        ):
            if getattr(self, name):
                return f"{name} is not accepted"
        if str(self.init_lora_weights).lower().startswith(_BASE_CHANGING_INITS):
            return f"init_lora_weights={self.init_lora_weights!r:.40} is not accepted: it changes the base model too"
        return ""

    def scale(self, rank: int) -> float:
        return self.lora_alpha / (math.sqrt(rank) if self.use_rslora else rank)


def read_adapter(name: str, path: str, max_rank: int, dtype: torch.dtype) -> AdapterWeights:
    """Read the adapter in the folder `path`, to be served as `name`, for a model with weights of dtype `dtype`.

    Raises:
        BadInput: The adapter is not supported. The message is one line with the name and the path.
    """
    folder = Path(path).expanduser()
    try:
        return _read_folder(name, folder, max_rank, dtype)
    except BadInput as error:
        raise BadInput(f"LoRA adapter {name!r:.140} ({path!r:.200}): {error}") from error


def _read_folder(name: str, folder: Path, max_rank: int, dtype: torch.dtype) -> AdapterWeights:
    if not folder.is_dir():
        raise BadInput(f"there is no such folder; one with {CONFIG} and {WEIGHTS} is accepted")
    content = _read_file(folder / CONFIG, MAX_CONFIG_BYTES)
    try:
        config = msgspec.json.decode(content, type=_Config)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadInput(f"{CONFIG} cannot be read: {error!s:.160}") from None
    if fault := config.fault():
        raise BadInput(f"{fault} ({CONFIG})")
    if not (folder / WEIGHTS).exists() and (folder / "adapter_model.bin").exists():
        raise BadInput(f"adapter_model.bin is not read, for it may hold code: save it as {WEIGHTS}")
    data = _read_file(folder / WEIGHTS, MAX_WEIGHTS_BYTES)
    deltas = _deltas(_tensors(data), config, max_rank, dtype)
    scale = f"{config.lora_alpha!r} {config.use_rslora}"
    key = hashlib.sha256(b"\0".join((name.encode(), scale.encode(), hashlib.sha256(data).digest()))).digest()
    return AdapterWeights(deltas, max(len(delta.a) for delta in deltas.values()), key)


def _read_file(path: Path, max_bytes: int) -> bytes:
    try:
        with open(path, "rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise BadInput(f"{path.name} cannot be read: {error.strerror}") from None
    if len(content) > max_bytes:
        raise BadInput(f"{path.name} is larger than {max_bytes} bytes")
    return content


def _tensors(data: bytes) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(data)
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise BadInput(f"{WEIGHTS} cannot be read: {error!s:.160}") from None


def _deltas(tensors: dict[str, torch.Tensor], config: _Config, max_rank: int, dtype: torch.dtype) -> dict[str, Delta]:
    deltas = {}
    for key, tensor in sorted(tensors.items()):  # for a deterministic error
        stem = key.removesuffix(_A).removesuffix(_B)
        if stem == key:
            raise BadInput(f"{key!r:.160} is not accepted: only lora_A and lora_B of linear layers are")
        if tensor.dim() != 2 or tensor.dtype not in _DTYPES or not tensor.numel():
            kind = f"{list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"
            raise BadInput(f"{key!r:.160} is {kind}: a matrix of float32, bfloat16 or float16 is accepted")
        other_key = stem + (_B if key.endswith(_A) else _A)
        if other_key not in tensors:
            raise BadInput(f"{other_key!r:.160} is missing")
        if key.endswith(_A):
            deltas[stem.removeprefix(_PREFIX)] = _delta(stem, tensor, tensors[stem + _B], config, max_rank, dtype)
    if not deltas:
        raise BadInput(f"{WEIGHTS} holds no layer")
    return deltas


def _delta(stem: str, a: torch.Tensor, b: torch.Tensor, config: _Config, max_rank: int, dtype: torch.dtype) -> Delta:
    rank = len(a)
    if b.dim() != 2 or b.shape[1] != rank:
        raise BadInput(f"lora_A and lora_B of {stem!r:.160} do not match: {list(a.shape)} and {list(b.shape)}")
    if rank > max_rank:
        raise BadInput(f"rank {rank} is not accepted: must be at most {max_rank} (--max-lora-rank)")
    delta = Delta(a.to(dtype), (b.float() * config.scale(rank)).to(dtype))
    if not all(bool(part.isfinite().all()) for part in delta):  # 0 * NaN: it would corrupt rows that use other slots
        raise BadInput(f"{stem!r:.160} holds NaN or infinity")
    return delta
