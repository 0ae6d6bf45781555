"""Parts whose difference a short trial cannot show are not fused, and broken fusing or packing is refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvscope_engine.model.layers.fused.packed_linear import PackedLinear, can_pack
from kvscope_engine.model.loaded_model import LoadedModel
from kvscope_engine.model.runner.model_runner import ModelRunner
from kvscope_engine.model.verification import fuse
from kvscope_engine.model.verification.fuse import fuse_model
from kvscope_telemetry.errors import BadInput

Load = Callable[..., LoadedModel]
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
LONGCAT = {
    "head_dim": 8,
    "num_layers": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "ffn_hidden_size": 96,
    "expert_ffn_hidden_size": 32,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "moe_topk": 2,
    "n_routed_experts": 4,
    "zero_expert_num": 2,
}
LLAMA4 = {
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 96,
    "interleave_moe_layer_step": 1,
    "layer_types": ["full_attention", "full_attention"],
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "a query scale that grows with the position": ("ministral3", {"rope_parameters": YARN}),
    "a clamp within the trial's numbers": ("olmo", {"clip_qkv": 1.0}),
    "a clamp beyond them": ("olmo", {"clip_qkv": 8.0}),
    "a router that reads a layer's weight": ("longcat_flash", LONGCAT),
}


@pytest.mark.parametrize("case", CASES)
def test_tokens_equal_transformers_for_unusual_attention(
    case: str, tiny_loaded: Load, planned: Any, eager_tokens: Any
) -> None:
    """The prompts continue beyond the position where a scale starts to differ."""
    model_type, changes = CASES[case]
    loaded = tiny_loaded(model_type, **changes)
    prompts: Sequence[list[int]] = [[3 + (7 * i * i + n) % 300 for i in range(n)] for n in (5, 19, 40)]
    expected = [eager_tokens(loaded, prompt, 6) for prompt in prompts]
    run = planned(loaded)
    for prompt in prompts:
        run.add(prompt, 6)
    assert run.run(max_chunk=11) == expected
    if model_type != "longcat_flash":
        assert run.runner.fused.attentions == 0, "this attention must not be fused"


def test_attention_with_a_clamp_is_not_fused_even_if_it_never_acts(tiny_loaded: Load) -> None:
    assert fuse_model(tiny_loaded("olmo", clip_qkv=1e9).module).attentions == 0
    assert fuse_model(tiny_loaded("olmo").module).attentions == 2


def test_packed_weight_has_a_shape_but_cannot_be_read() -> None:
    if not can_pack(torch.float32, torch.device("cpu")):
        pytest.skip("this CPU has no packed layers")
    weight = PackedLinear(torch.randn(8, 4), None).weight
    assert (weight.shape, weight.dtype, weight.device.type) == ((8, 4), torch.float32, "cpu")
    reads: list[Callable[[], Any]] = [
        lambda: weight + 1,
        lambda: weight.double(),
        lambda: torch.randn(2, 4) @ weight.t(),
    ]
    for read in reads:
        with pytest.raises(RuntimeError, match="reads a weight that is packed"):
            read()


def test_weight_read_by_other_modules_is_refused(tiny_loaded: Load) -> None:
    """The head is called like any other, and its weight is read elsewhere as well."""
    module: Any = tiny_loaded("llama").module
    if not can_pack(torch.float32, torch.device("cpu")):
        pytest.skip("this CPU has no packed layers")
    norm = module.model.norm
    forward = norm.forward
    norm.forward = lambda x: forward(x) + module.lm_head.weight[0]
    with pytest.raises(
        BadInput, match=r"LlamaForCausalLM is not supported: with its fused layers, .* weight that is packed"
    ):
        fuse_model(module)


def test_changed_logits_after_fusing_are_refused(tiny_loaded: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulates an error in packing, after every part was verified."""

    def pack(module: Any, called: Any) -> None:
        module.lm_head.weight.data.mul_(1.01)

    monkeypatch.setattr(fuse, "pack_linears", pack)
    monkeypatch.setattr(fuse, "can_pack", lambda *_: True)
    monkeypatch.setattr("kvscope_engine.model.layers.fused.packed_linear.PackedLinear", fuse_plain_linear())
    with pytest.raises(BadInput, match=r"with its fused layers, the results differ \(the logits after layer"):
        fuse_model(tiny_loaded("llama").module)


def fuse_plain_linear() -> Any:
    from kvscope_engine.model.layers.fused.packed_linear import FusedLinear

    return FusedLinear


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of storages made by operations that are still alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in self._known:
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.held += size
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._end, key, size)

    def _end(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.held -= size


def test_fusing_frees_the_replaced_weights_layer_by_layer(tiny_loaded: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without garbage collection: memory that only it would free is missing when the next layer needs it."""
    monkeypatch.setattr(fuse, "can_pack", lambda *_: False)
    sizes = {"hidden_size": 128, "intermediate_size": 1024, "num_hidden_layers": 8, "vocab_size": 320}
    module: Any = tiny_loaded("llama", **sizes).module
    layers = list(module.model.layers)
    in_a_layer = sum(parameter.nbytes for parameter in layers[0].parameters())
    projections = [layer.self_attn.q_proj for layer in layers] + [layer.mlp.up_proj for layer in layers]
    released = [weakref.ref(part.weight) for part in projections]
    weights = sum(parameter.nbytes for parameter in module.parameters())
    del projections, layers
    alive: list[int] = []
    replace = fuse.replace_part

    def counted(part: nn.Module, fused: Any, *names: str) -> None:
        replace(part, fused, *names)
        alive.append(sum(weight() is not None for weight in released))

    monkeypatch.setattr(fuse, "replace_part", counted)
    gc.disable()
    try:
        with LiveBytes() as ledger:
            fused = fuse_model(module)
    finally:
        gc.enable()
    assert fused.layers == 8
    assert [weight() for weight in released] == [None] * 16
    assert all(left <= 16 - done for done, left in enumerate(alive[:16]))
    # Fused weights are new; the replaced ones were not made in here. So new bytes beyond the fused
    # weights are the maximum that was held twice.
    assert ledger.peak <= weights + 2 * in_a_layer


def test_fusing_twice_does_nothing(tiny_loaded: Load, planned: Any) -> None:
    loaded = tiny_loaded("llama")
    first = fuse_model(loaded.module)
    runner: ModelRunner = planned(loaded).runner
    assert runner.fused is first
