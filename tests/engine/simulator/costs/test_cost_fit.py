"""Cost rates are fitted to measured times, saved to a file and checked when it is read."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvscope_engine.simulator.costs.cost_file import CostFile, load_costs, save_costs
from kvscope_engine.simulator.costs.cost_fit import ModelSizes, Sample, fit_costs, nonnegative_least_squares
from kvscope_engine.simulator.costs.cost_model import PRESETS, CostModel
from kvscope_telemetry.errors import BadInput, KvscopeError

SIZES = ModelSizes(
    weight_bytes=16e9, kv_bytes_per_token=131_072, flops_per_token=16e9, attention_flops_per_pair=524_288
)
TRUE = CostModel(
    weight_bytes=16e9,
    kv_bytes_per_token=131_072,
    flops_per_token=16e9,
    attention_flops_per_pair=524_288,
    memory_bandwidth=2.5e12,
    flops_per_second=4e14,
    step_overhead_s=0.003,
)

SLOW = CostModel(
    weight_bytes=0,
    kv_bytes_per_token=0,
    flops_per_token=16e9,
    attention_flops_per_pair=524_288,
    memory_bandwidth=1e18,
    flops_per_second=1e12,
    step_overhead_s=0,
)
COST = PRESETS["opt-13b"].cost


def samples(cost: CostModel, noise: float = 0.0) -> list[Sample]:
    rng, made = np.random.default_rng(0), []
    shapes = [(batch, context - 1, 1) for batch in (1, 4, 16, 64, 256) for context in (64, 1024, 8192)]
    shapes += [(1, start, chunk) for start in (0, 4096, 32_768) for chunk in (64, 512, 2048, 8192)]
    for batch, start, tokens in shapes:
        context, pairs = batch * (start + tokens), batch * (tokens * start + tokens * (tokens + 1) // 2)
        memory = (cost.weight_bytes + cost.kv_bytes_per_token * context) / cost.memory_bandwidth
        flops = cost.flops_per_token * batch * tokens + cost.attention_flops_per_pair * pairs
        seconds = max(memory, flops / cost.flops_per_second) + cost.step_overhead_s
        made.append(Sample(batch * tokens, context, pairs, seconds * (1 + noise * rng.standard_normal())))
    return made


def rates(cost: CostModel) -> list[float]:
    """Return the seconds per weights read, token of context, token, pair and step."""
    return [
        cost.weight_bytes / cost.memory_bandwidth,
        cost.kv_bytes_per_token / cost.memory_bandwidth,
        cost.flops_per_token / cost.flops_per_second,
        cost.attention_flops_per_pair / cost.flops_per_second,
        cost.step_overhead_s,
    ]


def test_cost_model_fitted_to_exact_step_times_has_the_exact_rates() -> None:
    fit = fit_costs(samples(TRUE), SIZES)
    assert rates(fit.cost) == pytest.approx(rates(TRUE), rel=1e-6)
    assert fit.cost.memory_bandwidth == pytest.approx(2.5e12)
    assert fit.cost.kv_bytes_per_token == pytest.approx(131_072)
    assert list(fit.predicted_s) == pytest.approx([sample.seconds for sample in samples(TRUE)])


def test_cost_model_fitted_to_noisy_step_times_has_nearly_the_true_rates() -> None:
    fit = fit_costs(samples(TRUE, noise=0.03), SIZES)
    assert rates(fit.cost)[:4] == pytest.approx(rates(TRUE)[:4], rel=0.15)
    assert fit.cost.step_overhead_s == pytest.approx(0.003, abs=0.0015)  # only prefills distinguish it from the weights
    errors = [predicted / sample.seconds - 1 for predicted, sample in zip(fit.predicted_s, samples(TRUE), strict=True)]
    assert max(map(abs, errors)) < 0.08


def rounded(made: list[Sample], seed: int) -> list[Sample]:
    """Return the same times, each changed by at most its last bit."""
    ulps = np.random.default_rng(seed).integers(-1, 2, len(made))
    return [
        replace(one, seconds=one.seconds + int(ulp) * np.spacing(one.seconds))
        for one, ulp in zip(made, ulps, strict=True)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_compute_bound_device_is_fitted_without_memory_cost(seed: int) -> None:
    """Slow memory explains the times as well as slow computing: neither rounding nor the CPU may decide
    between them.
    """
    fit = fit_costs(rounded(samples(SLOW), seed), SIZES)
    assert rates(fit.cost)[2:4] == pytest.approx([0.016, 524_288e-12], rel=1e-6)
    assert sum(rates(fit.cost)[:2]) < 1e-3


@pytest.mark.parametrize("seed", range(5))
def test_cost_fit_is_not_changed_by_rounding_errors_in_step_times(seed: int) -> None:
    fit = fit_costs(rounded(samples(TRUE), seed), SIZES)
    assert rates(fit.cost) == pytest.approx(rates(TRUE), rel=1e-6)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="names of x86 processors")
@pytest.mark.parametrize("processor", ["Prescott", "Haswell", "Zen", "SkylakeX"])
def test_cost_fit_gives_the_same_rates_with_linear_algebra_kernels_of_other_cpus(processor: str) -> None:
    """numpy's OpenBLAS can use the kernels of an older CPU; it reads the setting once, so each CPU has its own
    process.
    """
    flags = Path("/proc/cpuinfo").read_text("utf-8") if Path("/proc/cpuinfo").exists() else ""
    needed = {"Prescott": "sse2", "SkylakeX": "avx512f"}.get(processor, "avx2")
    if needed not in flags:
        pytest.skip(f"this processor has no {needed}")
    program = f"import runpy; found = runpy.run_path({__file__!r}); print(*found['rates_of_slow']())"
    environment = {**os.environ, "OPENBLAS_CORETYPE": processor}
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True
    ).stdout
    assert [float(word) for word in output.split()] == pytest.approx(rates_of_slow(), rel=1e-9, abs=1e-15)


def rates_of_slow() -> list[float]:
    return rates(fit_costs(samples(SLOW), SIZES).cost)


def test_fitted_rates_are_never_negative() -> None:
    matrix = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert nonnegative_least_squares(matrix, np.array([3.0, 2.0, 1.0])) == pytest.approx([2.0, 0.0])
    assert nonnegative_least_squares(matrix, np.array([1.0, 2.0, 3.0])) == pytest.approx([0.0, 1.0])
    assert nonnegative_least_squares(matrix, np.array([-1.0, -2.0, -3.0])) == pytest.approx([0.0, 0.0])


@pytest.mark.parametrize("scales", [(1.0, 1.0, 1.0), (1e-12, 1.0, 1e9), (3e7, 1 / 3, 1e-3), (1.0, 1e-15, 1e15)])
def test_cost_fit_does_not_depend_on_the_units_of_equivalent_factors(scales: tuple[float, float, float]) -> None:
    """The third column is the sum of the others, so it alone explains what they explain together."""
    first, second = np.array([1.0, 2.0, 3.0, 5.0]), np.array([7.0, 1.0, 0.1, 4.0])
    matrix = np.stack([first, second, first + second], axis=1) * scales
    found = nonnegative_least_squares(matrix, first + second)
    assert found == pytest.approx([0.0, 0.0, 1.0 / scales[2]], rel=1e-9)


def test_cost_factor_that_is_always_zero_is_fitted_with_no_cost() -> None:
    matrix = np.array([[0.0, 1.0], [0.0, 2.0], [0.0, 3.0]])
    assert nonnegative_least_squares(matrix, np.array([2.0, 4.0, 6.0])).tolist() == pytest.approx([0.0, 2.0])
    assert nonnegative_least_squares(matrix[:, :1], np.array([2.0, 4.0, 6.0])).tolist() == [0.0]


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(KvscopeError, match="4 steps were timed: at least 5"):
        fit_costs(samples(TRUE)[:4], SIZES)


def test_saved_cost_file_is_read_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    costs = CostFile(model="m", device="d", num_slots=1000, max_model_len=100, num_layers=2, cost_model=COST)
    save_costs(path, costs)
    assert load_costs(path) == costs
    assert costs.preset.cost == PRESETS["opt-13b"].cost
    with pytest.raises(KvscopeError, match="cannot be written"):
        save_costs(tmp_path / "no" / "where.json", costs)
    with pytest.raises(KvscopeError, match="it is a device, not a file"):
        save_costs(Path("/dev/null"), costs)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"cost_model": {"weight_bytes": 1}}, "missing required field"),
        ({"num_slots": 0}, "num_slots=0"),
        ({"max_model_len": -4}, "max_model_len=-4"),
        ({"kvscope_costs": 9}, "format 9"),
        ({"model": 3}, "Expected `str`"),
        ({"cost_model": {"memory_bandwidth": -1.0}}, "memory_bandwidth=-1"),
        ({"cost_model": {"flops_per_second": "fast"}}, "Expected `float`"),
    ],
)
def test_invalid_cost_file_is_refused_in_one_line(tmp_path: Path, change: dict[str, object], named: str) -> None:
    path = tmp_path / "costs.json"
    save_costs(
        path,
        CostFile(model="m", device="d", num_slots=10, max_model_len=10, num_layers=2, cost_model=COST),
    )
    value = json.loads(path.read_bytes())
    inner = change.get("cost_model")
    if isinstance(inner, dict) and "weight_bytes" not in inner:
        change = {"cost_model": value["cost_model"] | inner}
    path.write_text(json.dumps(value | change))
    with pytest.raises(BadInput) as caught:
        load_costs(path)
    assert named in str(caught.value)
    assert "costs.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b" " * (2 << 20), b"[]"])
def test_file_that_is_no_json_object_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "odd.json"
    path.write_bytes(data)
    with pytest.raises(BadInput, match=r"odd\.json' are not accepted"):
        load_costs(path)
    with pytest.raises(BadInput, match="cannot be read: No such file"):
        load_costs(tmp_path / "nowhere.json")
