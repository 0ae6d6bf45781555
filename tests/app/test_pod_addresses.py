"""Tests of `--attach k8s://…`, which stands for all pods that it selects."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.telemetry.collectors.kubernetes.fake_kubectl import FakeKubectl, pod

from kvscope_app.access_options import MAX_PODS
from kvscope_app.command_line import Options, parse
from kvscope_telemetry.errors import BadInput


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeKubectl:
    return FakeKubectl(tmp_path, monkeypatch)


def test_address_of_pods_is_replaced_by_one_address_for_each(kubectl: FakeKubectl) -> None:
    kubectl.set_pods([pod("vllm-1"), pod("vllm-0")])
    options = parse(["--attach", "k8s://llm/app=vllm"])
    assert isinstance(options, Options)
    assert [address.text for address in options.attach] == [
        f"k8s://llm/app=vllm?pod=vllm-{number}&engine=vllm&port=8000" for number in range(2)
    ]


@pytest.mark.parametrize(("num_pods", "words"), [(0, "no pod with an engine"), (MAX_PODS + 1, "selects 9 pods")])
def test_no_pods_and_too_many_pods_are_refused(kubectl: FakeKubectl, num_pods: int, words: str) -> None:
    kubectl.set_pods([pod(f"vllm-{number}") for number in range(num_pods)])
    with pytest.raises(BadInput, match=words):
        parse(["--attach", "k8s://llm/app=vllm"])
