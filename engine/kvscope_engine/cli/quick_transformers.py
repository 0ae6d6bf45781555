"""Imports torch and transformers without parts that kvscope does not use but that take most of the time.

Processor time of the imports (transformers 5.23, torch 2.13): 4.0 s; with this module 2.05 s. The parts are
torch._dynamo, the compiler behind `torch.compile`; sympy, its algebra; DTensor; and transformers' continuous batching.
The names of transformers' classes by module are read from kvscope's cache instead of some 2,500 source files.

A part is still imported when something reads more of it than the names defined here. Another version of transformers
than the tested one is imported as a whole.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any, Final
from unittest.mock import patch

from kvscope_engine.cli.notices import print_notice
from kvscope_engine.cli.placeholder_module import PlaceholderModule
from kvscope_engine.json_cache import read_entry, write_entry

TESTED_VERSION: Final = "5.23."
"""Start of the version of transformers that this module was tested with."""
_UTILITIES: Final = "transformers.utils.import_utils"
_IMPORTED: Final = (
    "transformers",
    "transformers.models",
    "transformers.modeling_utils",
    "transformers.masking_utils",
    "transformers.generation.utils",
    "transformers.modeling_layers",
)
"""Modules that import parts which are left out. Models import these modules and no others of the kind."""
_SHAPES: Final = "torch.fx.experimental.symbolic_shapes"
_DYNAMO: Final = "torch._dynamo"
_MASK_TRACING: Final = "torch._dynamo._trace_wrapped_higher_order_op"
_BATCHING: Final = "transformers.generation.continuous_batching"


def import_transformers() -> None:
    """Import transformers' base classes. Does nothing if they are imported already."""
    if _UTILITIES in sys.modules or not _is_tested_version():
        return
    import torch.compiler
    import torch.fx.experimental

    no_algebra = PlaceholderModule("sympy", {"Basic": type("Basic", (), {})})  # torch asks whether numbers are that
    for placeholder in (no_algebra, _shapes_placeholder(), _dynamo_placeholder()):
        placeholder.install()
    finder = _UtilitiesFinder()
    sys.meta_path.insert(0, finder)
    try:
        with _without_batching(), patch.object(torch.compiler, "disable", _undecorated):
            for name in _IMPORTED:
                import_module(name)
    finally:
        sys.meta_path.remove(finder)


def _is_tested_version() -> bool:
    try:
        return version("transformers").startswith(TESTED_VERSION)
    except PackageNotFoundError:
        return False


def _dynamo_placeholder() -> PlaceholderModule:
    names = ("allow_in_graph", "assume_constant_result", "disable")
    return PlaceholderModule(_DYNAMO, dict.fromkeys(names, _undecorated))


def _undecorated(function: Any = None, *_: Any, **__: Any) -> Any:
    """Replace decorators that have an effect only on functions compiled with `torch.compile`."""
    return function if function is not None else lambda decorated: decorated


def _shapes_placeholder() -> PlaceholderModule:
    """Return functions that decide what torch knows about a symbolic shape, for the case that it is a number."""
    same: list[str] = ["expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious"]
    same += ["guarding_hint_or_throw", "statically_known_true"]
    functions: dict[str, Callable[..., Any]] = dict.fromkeys(same, lambda value: value) | {
        "has_guarding_hint": lambda value: True,
        "is_concrete_int": lambda value: True,
        "is_nested_int": lambda value: False,
        "sym_and": lambda *values: all(values),
        "sym_eq": lambda left, right: left == right,
        "sym_or": lambda *values: any(values),
    }
    return PlaceholderModule(_SHAPES, {name: _for_numbers(name, function) for name, function in functions.items()})


def _for_numbers(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` for arguments without symbols. With others, torch's function `name` is called."""

    def call(*args: Any) -> Any:
        if all(map(_is_number, args)):
            return function(*args)
        placeholder = sys.modules[_SHAPES]
        module = placeholder.load() if isinstance(placeholder, PlaceholderModule) else placeholder
        return getattr(module, name)(*args)

    return call


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, tuple) and all(map(_is_number, value)))


@contextmanager
def _without_batching() -> Iterator[None]:
    """Return a context in which transformers' continuous batching has only empty classes, and the class that compiled
    masks need is imported when it is used.
    """
    classes = {name: type(name, (), {}) for name in ("ContinuousMixin", "PagedAttentionCache")}
    placeholders = (
        PlaceholderModule(_BATCHING, classes),
        PlaceholderModule(f"{_BATCHING}.cache", classes),
        PlaceholderModule(_MASK_TRACING, {"TransformGetItemToIndex": _transform_indexes}),
    )
    for placeholder in placeholders:
        placeholder.install()
    try:
        yield
    finally:
        for placeholder in placeholders:
            placeholder.remove()


def _transform_indexes() -> Any:
    return import_module(_MASK_TRACING).TransformGetItemToIndex()


class _UtilitiesFinder(MetaPathFinder):
    """Changes `transformers.utils.import_utils` after it was executed, before other modules read its functions."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _UTILITIES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _UtilitiesLoader(spec.loader)
        return spec


class _UtilitiesLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        utilities: Any = module
        read_structure = utilities.define_import_structure
        utilities.define_import_structure = lambda *args, **kwargs: _import_structure(read_structure, *args, **kwargs)
        utilities.is_torch_distributed_available = lambda: False  # as in a torch that was built without it


ImportStructure = dict[frozenset[str], dict[str, set[str]]]
"""Names of classes by module, by the packages that the module needs."""


def _import_structure(
    read_structure: Callable[..., ImportStructure], path: str | Path, prefix: str | None = None
) -> ImportStructure:
    """Return transformers' classes by module, from the cache if the folder is unchanged.

    `prefix` is put in front of the names of modules; `read_structure` reads all source files in the folder.
    """
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    identity = f"transformers {version('transformers')} in {folder}, changed {_newest_change_ns(folder)}"
    stored = read_entry("transformers", identity, print_notice)
    if not _is_structure(stored):
        structure = read_structure(path)
        stored = [
            [sorted(packages), {name: sorted(classes) for name, classes in modules.items()}]
            for packages, modules in structure.items()
        ]
        write_entry("transformers", identity, stored)
    start = "" if prefix is None else f"{prefix}."
    return {
        frozenset(packages): {f"{start}{name}": set(classes) for name, classes in modules.items()}
        for packages, modules in stored
    }


def _newest_change_ns(folder: Path) -> int:
    """Return when a file was last added to, removed from or renamed in `folder` or a folder in it.

    Changes inside files are not seen: an installed package is replaced as a whole.
    """
    folders = [folder, *(path for path in folder.iterdir() if path.is_dir())]
    return max(path.stat().st_mtime_ns for path in folders)


def _is_structure(stored: Any) -> bool:
    try:
        return bool(stored) and all(
            isinstance(name, str) and all(isinstance(one, str) for one in [*packages, *classes])
            for packages, modules in stored
            for name, classes in modules.items()
        )
    except (TypeError, ValueError, AttributeError):
        return False
