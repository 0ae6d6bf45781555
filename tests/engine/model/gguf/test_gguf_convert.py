"""A converted GGUF file is the model that transformers makes of it; what it cannot be is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kvscope_engine.model.gguf.cache import convert_gguf, recast
from kvscope_engine.model.loading.checkpoint import load_weights
from kvscope_engine.model.loading.hf_config import read_config
from kvscope_engine.model.text.tokenizer_files import load_tokenizer
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.telemetry import Progress

CPU = torch.device("cpu")
IDS = torch.tensor([[1, 50, 60, 70]])


def reference(gguf: Path) -> Any:
    """The model as transformers loads it."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, attn_implementation="eager"
    )


@pytest.mark.filterwarnings("ignore")
def test_same_logits_and_tokens(
    tiny_gguf: Callable[..., Path], tmp_path: Path, heard: list[Progress], same: Callable[..., bool]
) -> None:
    gguf, folder = tiny_gguf(), tmp_path / "converted"
    convert_gguf(gguf, torch.float32, folder, heard.append)
    config = read_config(folder / "config.json")
    model = load_weights(folder, config, torch.float32, CPU, "x", heard.append)
    assert same(model, reference(gguf), IDS)
    assert not hasattr(config, "quantization_config")
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.chat([{"role": "user", "content": "Hi"}])) == "<s>user\nHi</s><s>assistant\n"


def test_progress_and_silence(
    tiny_gguf: Callable[..., Path], tmp_path: Path, heard: list[Progress], capfd: pytest.CaptureFixture[str]
) -> None:
    convert_gguf(tiny_gguf(), torch.float32, tmp_path / "converted", heard.append)
    tensors = [progress for progress in heard if progress.unit == "tensors"]
    assert {progress.stage for progress in heard} == {"convert"}
    assert tensors[0].done == 0
    assert any(progress.done == progress.total == 20 for progress in tensors)
    assert capfd.readouterr() == ("", "")


def test_another_dtype_is_the_same_either_way(
    tiny_gguf: Callable[..., Path], tmp_path: Path, heard: list[Progress]
) -> None:
    gguf = tiny_gguf()
    convert_gguf(gguf, torch.float32, tmp_path / "exact", heard.append)
    convert_gguf(gguf, torch.bfloat16, tmp_path / "direct", heard.append)
    (tmp_path / "recast").mkdir()
    recast(tmp_path / "exact", torch.bfloat16, tmp_path / "recast", "x", heard.append)
    direct, made = (load_file(tmp_path / name / "model.safetensors") for name in ("direct", "recast"))
    assert direct.keys() == made.keys()
    assert all(tensor.dtype is torch.bfloat16 and torch.equal(tensor, made[name]) for name, tensor in direct.items())
    assert {path.name for path in (tmp_path / "recast").iterdir()} == {
        path.name for path in (tmp_path / "direct").iterdir()
    }


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"without": ["blk.1.attn_q.weight", "blk.0.ffn_up.weight"]}, "lacks 2 weights"),
        ({"embedding_length": 32}, "wrong shape"),
        ({"block_count": 3}, "lacks"),
    ],
)
def test_a_file_that_does_not_fit_itself(
    tiny_gguf: Callable[..., Path], tmp_path: Path, heard: list[Progress], changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(BadInput, match=reason) as refused:
        convert_gguf(tiny_gguf(**changes), torch.float32, tmp_path / "converted", heard.append)
    assert "\n" not in str(refused.value)


def test_an_unknown_architecture_is_named(
    tiny_gguf: Callable[..., Path], tmp_path: Path, heard: list[Progress]
) -> None:
    gguf = tiny_gguf()
    gguf.write_bytes(gguf.read_bytes().replace(b"llama", b"lllll"))
    with pytest.raises(BadInput, match="lllll"):
        convert_gguf(gguf, torch.float32, tmp_path / "converted", heard.append)
