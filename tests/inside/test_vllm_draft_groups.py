"""KV groups of vLLM that contain layers of a draft model are labelled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvscope_app.views.block_locations import group_name
from kvscope_inside.vllm.vllm_facts import kv_group


class FullAttentionSpec(SimpleNamespace):
    block_size = 16
    page_size_bytes = 1024


def spec(*, is_draft: bool = False, **more: Any) -> FullAttentionSpec:
    return FullAttentionSpec(is_draft=is_draft, **more)


UNIFORM = spec(kv_cache_specs={"target.0": spec(), "target.1": spec(), "draft.0": spec(is_draft=True)})


@pytest.mark.parametrize(
    ("layers", "layer_spec", "more", "name"),
    [
        (("target.0", "target.1"), spec(), {}, "full attention, 2 layers"),
        (("draft.0",), spec(is_draft=True), {}, "full attention, 1 layer of a draft model"),
        (tuple(UNIFORM.kv_cache_specs), UNIFORM, {}, "full attention, 3 layers, 1 of them a draft model's"),
        (
            ("target.0", "draft.0"),
            spec(),
            {"is_eagle_group": True},
            "full attention, 2 layers, some of them a draft model's",
        ),
    ],
    ids=["none", "all", "one", "some"],
)
def test_group_with_layers_of_a_draft_model_is_labelled(
    layers: tuple[str, ...], layer_spec: FullAttentionSpec, more: dict[str, bool], name: str
) -> None:
    group = SimpleNamespace(layer_names=list(layers), kv_cache_spec=layer_spec, **more)
    assert group_name(kv_group(group, 0.0)) == name


def test_group_of_a_version_without_draft_marks_is_not_labelled() -> None:
    old = SimpleNamespace(block_size=16, page_size_bytes=1024)
    group = SimpleNamespace(layer_names=["model.0"], kv_cache_spec=old)
    assert kv_group(group, 0.0).num_draft_layers == 0
