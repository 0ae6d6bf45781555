"""Operations that make the host wait for the device are found, with their module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from kvscope_engine.model.cuda_graphs.host_reads import HostReads

CPU = torch.device("cpu")


class InnerModule(nn.Module):
    """Runs one given operation."""

    def __init__(self, does: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self._does = does

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._does(x)
        return x


def words_of(does: Callable[[torch.Tensor], Any]) -> str:
    module = nn.Sequential(nn.Identity(), nn.Sequential(InnerModule(does)))
    with HostReads(module, CPU) as reads:
        module(torch.arange(6.0))
    return reads.description


@pytest.mark.parametrize(
    ("does", "operation"),
    [
        (lambda x: x.nonzero(), "aten::nonzero"),
        (lambda x: x.sum().item(), "aten::_local_scalar_dense"),
        (lambda x: bool(x.sum() > 0), "aten::_local_scalar_dense"),
        (lambda x: x[x > 2], "aten::index"),
        (lambda x: x.unique(), "aten::_unique2"),
        (lambda x: x.to("meta"), "aten::_to_copy"),
        (lambda x: torch.empty(6, device="meta").copy_(x), "aten::copy_"),
    ],
)
def test_operation_that_makes_the_host_wait_for_the_gpu_is_named_with_its_module(
    does: Callable[[torch.Tensor], Any], operation: str
) -> None:
    assert words_of(does) == f"InnerModule (1.0) waits for the GPU ({operation})"


@pytest.mark.parametrize(
    "does",
    [
        lambda x: x.topk(2),
        lambda x: x[torch.tensor([1, 2])],
        lambda x: torch.where(x > 2, x, 0),
        lambda x: x.to(torch.float64).sort(),
        lambda x: x.clone().copy_(x),
    ],
)
def test_operation_that_needs_no_host_wait_is_not_reported(does: Callable[[torch.Tensor], Any]) -> None:
    assert words_of(does) == ""


def test_expert_routing_that_makes_the_host_wait_for_the_gpu_is_reported() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}
    config = AutoConfig.for_model("qwen3_moe", **sizes, num_experts=4, num_experts_per_tok=2, num_key_value_heads=2)
    auto: Any = AutoModelForCausalLM
    module = auto.from_config(config, experts_implementation="eager").eval()
    with torch.inference_mode(), HostReads(module, CPU) as reads:
        module(torch.arange(5)[None])
    assert "(model.layers.0.mlp.experts) waits for the GPU" in reads.description
    module.train()
    assert not module._forward_hooks
