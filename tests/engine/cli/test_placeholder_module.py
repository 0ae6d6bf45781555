"""Modules that stand for others until they are needed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from kvscope_engine.cli.placeholder_module import PlaceholderModule

NAME = "a_slow_package"
FIXED = """
import sys
from types import ModuleType

class Fixed(ModuleType):
    def __setattr__(self, name, value):
        raise AttributeError(name)

sys.modules[__name__].__class__ = Fixed
"""


@pytest.fixture
def placeholder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PlaceholderModule]:
    folder = tmp_path / NAME
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "from . import fixed, part\nfast = 'real'\nslow = part.value\n__version__ = '1.0'\n"
    )
    (folder / "part.py").write_text("value = []\n")
    (folder / "fixed.py").write_text(FIXED)
    monkeypatch.syspath_prepend(tmp_path)
    placeholder = PlaceholderModule(NAME, {"fast": "known"})
    placeholder.install()
    yield placeholder
    placeholder.remove()
    for name in [name for name in sys.modules if name.startswith(NAME)]:
        del sys.modules[name]


def test_known_attributes_do_not_import_the_real_module(placeholder: PlaceholderModule) -> None:
    assert import_module(NAME).fast == "known"
    assert not hasattr(placeholder, "__file__")
    assert sys.modules[NAME] is placeholder


@pytest.mark.parametrize("attribute", ["slow", "__version__"])
def test_other_attribute_comes_from_the_real_module(placeholder: PlaceholderModule, attribute: str) -> None:
    assert getattr(placeholder, attribute) == getattr(import_module(NAME), attribute)
    assert import_module(NAME).fast == "real"


def test_module_below_the_placeholder_is_imported_once(placeholder: PlaceholderModule) -> None:
    part = import_module(f"{NAME}.part")
    assert import_module(NAME) is not placeholder
    assert part is import_module(NAME).part
    assert part.value is import_module(NAME).slow
    assert part.__spec__ is not None
    assert part.__spec__.origin == part.__file__


def test_module_whose_attributes_cannot_be_set_is_imported(placeholder: PlaceholderModule) -> None:
    assert import_module(f"{NAME}.fixed") is sys.modules[f"{NAME}.fixed"]


def test_loaded_module_is_not_replaced(placeholder: PlaceholderModule) -> None:
    real = placeholder.load()
    PlaceholderModule(NAME, {}).install()
    assert sys.modules[NAME] is real
