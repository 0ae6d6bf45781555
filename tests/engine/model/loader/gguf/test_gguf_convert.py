"""A converted GGUF file equals the model that transformers makes of it; unsupported files are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kvscope_engine.model.hf_config import eos_token_ids, read_config
from kvscope_engine.model.loader.checkpoint import load_weights
from kvscope_engine.model.loader.gguf.gguf_cache import convert_gguf, recast
from kvscope_engine.model.loader.gguf.gguf_entries import content_sha256
from kvscope_engine.tokenization.tokenizer_files import load_tokenizer
from kvscope_telemetry.errors import BadInput
from kvscope_telemetry.messages.telemetry import Progress

CPU = torch.device("cpu")
IDS = torch.tensor([[1, 50, 60, 70]])


def reference(gguf: Path) -> Any:
    """Return the model as loaded by transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, attn_implementation="eager"
    )


@pytest.mark.filterwarnings("ignore")
def test_conversion_has_the_same_logits_and_tokenizer(
    tiny_gguf: Callable[..., Path], tmp_path: Path, progress_events: list[Progress], same: Callable[..., bool]
) -> None:
    gguf, folder = tiny_gguf(), tmp_path / "converted"
    convert_gguf(gguf, torch.float32, folder, progress_events.append)
    config = read_config(folder / "config.json")
    model = load_weights(folder, config, torch.float32, CPU, "x", progress_events.append)
    assert same(model, reference(gguf), IDS)
    assert not hasattr(config, "quantization_config")
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.chat([{"role": "user", "content": "Hi"}])) == "<s>user\nHi</s><s>assistant\n"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"eos_token_id": 0, "eot_token_id": 2}, {0, 2}),
        ({"eos_token_id": 2, "eom_token_id": 1}, {1, 2}),
        ({}, {2}),
    ],
    ids=str,
)
def test_end_of_turn_and_message_tokens_end_an_answer(
    tiny_gguf: Callable[..., Path],
    tmp_path: Path,
    progress_events: list[Progress],
    changes: dict[str, int],
    expected: set[int],
) -> None:
    exact, other = tmp_path / "converted", tmp_path / "other"
    convert_gguf(tiny_gguf(**changes), torch.float32, exact, progress_events.append)
    other.mkdir()
    recast(exact, torch.bfloat16, other, "x", progress_events.append)
    for folder in (exact, other):
        assert eos_token_ids(folder, read_config(folder / "config.json")) == expected


def test_control_tokens_recognized_by_text_end_an_answer(
    tiny_gguf: Callable[..., Path], tmp_path: Path, progress_events: list[Progress]
) -> None:
    gguf = tiny_gguf(tokens=["<unk>", "<|im_end|>", "</s>"])
    convert_gguf(gguf, torch.float32, tmp_path / "converted", progress_events.append)
    config = read_config(tmp_path / "converted" / "config.json")
    assert eos_token_ids(tmp_path / "converted", config) == {1, 2}


def test_conversion_reports_progress_and_prints_nothing(
    tiny_gguf: Callable[..., Path], tmp_path: Path, progress_events: list[Progress], capfd: pytest.CaptureFixture[str]
) -> None:
    convert_gguf(tiny_gguf(), torch.float32, tmp_path / "converted", progress_events.append)
    tensors = [progress for progress in progress_events if progress.unit == "tensors"]
    assert {progress.stage for progress in progress_events} == {"convert"}
    assert tensors[0].done == 0
    assert any(progress.done == progress.total == 20 for progress in tensors)
    assert capfd.readouterr() == ("", "")


def test_gguf_conversion_recast_to_bfloat16_equals_a_direct_conversion(
    tiny_gguf: Callable[..., Path], tmp_path: Path, progress_events: list[Progress]
) -> None:
    gguf = tiny_gguf()
    convert_gguf(gguf, torch.float32, tmp_path / "exact", progress_events.append)
    convert_gguf(gguf, torch.bfloat16, tmp_path / "direct", progress_events.append)
    (tmp_path / "recast").mkdir()
    recast(tmp_path / "exact", torch.bfloat16, tmp_path / "recast", "x", progress_events.append)
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
def test_gguf_file_with_missing_or_misshaped_weights_is_refused(
    tiny_gguf: Callable[..., Path],
    tmp_path: Path,
    progress_events: list[Progress],
    changes: dict[str, Any],
    reason: str,
) -> None:
    with pytest.raises(BadInput, match=reason) as refused:
        convert_gguf(tiny_gguf(**changes), torch.float32, tmp_path / "converted", progress_events.append)
    assert "\n" not in str(refused.value)


def test_unknown_architecture_is_named(
    tiny_gguf: Callable[..., Path], tmp_path: Path, progress_events: list[Progress]
) -> None:
    gguf = tiny_gguf()
    gguf.write_bytes(gguf.read_bytes().replace(b"llama", b"lllll"))
    with pytest.raises(BadInput, match="lllll"):
        convert_gguf(gguf, torch.float32, tmp_path / "converted", progress_events.append)


def split(gguf: Path, count: int, first_tensors: int = 0) -> Path:
    """Split a file like `llama-gguf-split` (the first part may have no tensors). Returns the first part."""
    from gguf import GGUFReader, GGUFValueType, GGUFWriter

    reader = GGUFReader(gguf)
    cuts = [first_tensors, *(len(reader.tensors) * number // (count - 1) for number in range(1, count))]
    paths = [gguf.with_name(f"part-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    for number, path in enumerate(paths):
        writer = GGUFWriter(path, "llama")
        for key, field in reader.fields.items() if number == 0 else ():
            if key.startswith("GGUF.") or key == "general.architecture":
                continue
            if field.types[0] == GGUFValueType.ARRAY:
                writer.add_array(key, field.contents())
            else:
                writer.add_key_value(key, field.contents(), field.types[0])
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        for tensor in reader.tensors[cuts[number - 1] if number else 0 : cuts[number]]:
            writer.add_tensor(tensor.name, tensor.data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first_tensors", [0, 5])
def test_split_file_converts_like_the_whole(
    tiny_gguf: Callable[..., Path], tmp_path: Path, progress_events: list[Progress], first_tensors: int
) -> None:
    gguf = tiny_gguf()
    first = split(gguf, 3, first_tensors)
    folders = [tmp_path / name for name in ("whole", "parts")]
    for source, folder in zip((gguf, first), folders, strict=True):
        convert_gguf(source, torch.float32, folder, progress_events.append)
    whole, parts = (load_file(folder / "model.safetensors") for folder in folders)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert (folders[0] / "config.json").read_text() == (folders[1] / "config.json").read_text()
    before = content_sha256(first)
    other = first.with_name(first.name.replace("00001", "00003", 1))
    other.write_bytes(other.read_bytes()[:-1] + b"\x01")
    assert content_sha256(first) != before


def test_split_gguf_model_is_refused_if_a_part_is_missing_or_the_first_is_not_given(
    tiny_gguf: Callable[..., Path], tmp_path: Path, progress_events: list[Progress]
) -> None:
    first = split(tiny_gguf(), 3)
    second, third = (first.with_name(first.name.replace("00001", number, 1)) for number in ("00002", "00003"))
    with pytest.raises(BadInput, match=r"it is part 2 of 3, give the first, part-00001-of-00003\.gguf"):
        convert_gguf(second, torch.float32, tmp_path / "x", progress_events.append)
    alone = first.rename(tmp_path / "alone.gguf")
    with pytest.raises(BadInput, match="it is one of 3 parts, which must be beside it"):
        convert_gguf(alone, torch.float32, tmp_path / "x", progress_events.append)
    alone.rename(first)
    third.unlink()
    with pytest.raises(BadInput, match=r"part-00003-of-00003\.gguf, one of its 3 parts, is not in the same folder"):
        convert_gguf(first, torch.float32, tmp_path / "x", progress_events.append)
