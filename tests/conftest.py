"""Fixtures of all tests: one thread, no display, no progress bars, and the name of a tiny model."""

from __future__ import annotations

import builtins
import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from tests.rewritten import rewrite_share
from tests.warm_python import WarmPython

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # started in the background: child processes would ignore Ctrl-C as well
    signal.signal(signal.SIGINT, signal.default_int_handler)

STORMS = bool(os.environ.get("KVSCOPE_STORMS") or os.environ.get("KVSCOPE_SOAK"))


def examples(whole: int) -> int:
    """Return how many of `whole` examples hypothesis tries: a fifth, and all of them when `KVSCOPE_STORMS` is set."""
    return whole if STORMS else whole // 5


# The time to draw and run examples is not part of what is tested.
settings.register_profile(
    "any machine",
    deadline=None,
    max_examples=examples(100),
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.large_base_example,
        HealthCheck.filter_too_much,
        HealthCheck.function_scoped_fixture,
    ],
)
settings.load_profile("any machine")

ROOT = Path(__file__).parents[1]
TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "initializer_range": 0.4,  # large enough that every token depends on all earlier ones
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


LONG = frozenset(
    (
        "end_to_end",
        "test_every_action.py",
        "test_window_leaks.py",
        "test_compile_report.py",
        "test_engine_storms.py",
        "test_engine_tiers.py",
        "test_memory_at_start.py",
        "test_compare_window.py",
        "planning",
        "rehearsal",
    )
)
"""Folders and files whose tests take many seconds each."""


def pytest_sessionstart(session: pytest.Session) -> None:
    """Rewrite assertions before anything is collected."""
    rewrite_share(session.config)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move long tests to the front after the tests were shuffled, so that no process is left alone with one at the
    end.
    """
    items.sort(key=lambda item: LONG.isdisjoint(item.path.parts))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Disable garbage collection, which would find nothing while modules are loaded."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Freeze the loaded objects, so that garbage collection does not check them again and again."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked `storm` unless storms are enabled."""
    if not STORMS and is_marked(item, "storm"):
        pytest.skip("a long one: KVSCOPE_STORMS=1 runs it, as .ci/run does")


def is_marked(item: pytest.Item, name: str) -> bool:
    """Return whether a test has a mark of this name, without parameters or with some that apply to it."""
    mark, call = item.get_closest_marker(name), getattr(item, "callspec", None)
    given = call.params if call else {}
    return mark is not None and (not mark.args or any(named.items() <= given.items() for named in mark.args))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Add the seed of the test order and random numbers to the report of a failed test."""
    report = yield
    seed = _seed(item.config)
    if report.failed and seed is not None:
        report.sections.append(("the same again", f"pytest -n 0 --randomly-seed={seed} {item.nodeid!r}"))
    return report


@pytest.fixture(scope="module", autouse=True)
def _plain_imports(request: pytest.FixtureRequest) -> Iterator[None]:
    """Remove the import hook of PySide, which pytest-qt loads: it checks every import that runs, and torch runs
    millions.
    """
    plain = getattr(builtins, "__orig_import__", None)
    with pytest.MonkeyPatch.context() as patch:
        if plain is not None and "app" not in request.path.parent.relative_to(ROOT).parts:
            patch.setattr(builtins, "__import__", plain)
        yield


@pytest.fixture(autouse=True)
def _torch_seed(request: pytest.FixtureRequest) -> None:
    """Seed torch's random numbers before each test; pytest-randomly seeds those of Python and numpy."""
    torch, seed = sys.modules.get("torch"), _seed(request.config)
    if torch is not None and seed is not None:
        torch.manual_seed(seed)


def _seed(config: pytest.Config) -> int | None:
    """Return the seed, or None without pytest-randomly."""
    seed = getattr(config.option, "randomly_seed", None)
    return seed if isinstance(seed, int) else None


@pytest.fixture(scope="session", autouse=True)
def _no_user_config(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Use an empty configuration folder, so that keys and connections of the user are neither read nor written."""
    os.environ["XDG_CONFIG_HOME"] = str(tmp_path_factory.mktemp("config"))


@pytest.fixture(scope="session")
def amount() -> Callable[[int, int], int]:
    """Function that returns the size of a soak test, the whole one when `KVSCOPE_SOAK` is set: `amount(small,
    whole)`.
    """
    return lambda small, whole: whole if os.environ.get("KVSCOPE_SOAK") else small


@pytest.fixture(scope="session")
def storm() -> Callable[[int, int], int]:
    """Function that returns the size of a long search, the whole one when `KVSCOPE_STORMS` is set: `storm(small,
    whole)`.
    """
    return lambda small, whole: whole if STORMS else small


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Function that returns the name of a tiny random Llama without a tokenizer: `tiny_model(**config_changes)`."""

    def name(**changes: object) -> str:
        path = tmp_path_factory.mktemp("tiny") / "config.json"
        path.write_text(json.dumps(TINY_LLAMA | changes))
        return f"dummy:{path}"

    return name


@pytest.fixture(scope="session")
def warm_python(_no_user_config: None) -> Iterator[WarmPython]:
    """Start processes that need not import the engine first. Skips tests of an installation without the engine."""
    if find_spec("torch") is None:
        pytest.skip("needs the extra engine")
    warm = WarmPython()
    yield warm
    warm.close()
