"""A short run of `fuzz_forms.py`: random forms are answered or refused by name, and all processes end."""

from __future__ import annotations

import json
import random

import pytest
from tests.engine import fuzz_forms


@pytest.mark.storm
@pytest.mark.timeout(1_500)
def test_random_forms_are_answered_or_refused_and_all_processes_end() -> None:
    pytest.importorskip("xgrammar")
    options = ["--num-gpu-blocks-override", "512", "--max-num-seqs", "16", "--device", "cpu"]
    found = fuzz_forms.run(3, seed=random.randrange(1 << 30), clients=4, quiet_s=0.5, options=options)
    assert sum(found["became"].values()) == 3
    for what in found["became"]:
        assert what == "answered" or what.startswith(("400", "429", "500 for one token")), json.dumps(found)
    assert not found["left_behind"]
    assert found["gaps"]
