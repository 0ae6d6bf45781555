"""Modules that stand for others in `sys.modules` until an attribute is read that only the real module has."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class PlaceholderModule(ModuleType):
    """Stands for the module `name`. Reading an attribute that is not in `known`, or importing a module below `name`,
    imports the real module.
    """

    def __init__(self, name: str, known: Mapping[str, Any]) -> None:
        super().__init__(name)
        self.__dict__.update(known)
        self.__dict__["__path__"] = []

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__") and attribute != "__version__":  # read by code that goes through all modules
            raise AttributeError(f"module {self.__name__!r} has no attribute {attribute!r}")
        return getattr(self.load(), attribute)

    def install(self) -> None:
        """Put the placeholder into `sys.modules`, unless the real module is there."""
        if self.__name__ in sys.modules:
            return
        sys.modules[self.__name__] = self
        sys.meta_path.insert(0, _SubmoduleFinder(self))
        package, _, name = self.__name__.rpartition(".")
        if package in sys.modules:
            setattr(sys.modules[package], name, self)

    def load(self) -> ModuleType:
        """Import and return the real module, which replaces the placeholder."""
        if sys.modules.get(self.__name__) is self:
            self.remove()
        return import_module(self.__name__)

    def remove(self) -> None:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        sys.meta_path[:] = [
            finder for finder in sys.meta_path if not (isinstance(finder, _SubmoduleFinder) and finder.parent is self)
        ]


class _SubmoduleFinder(MetaPathFinder):
    """Imports the real module of a placeholder before a module below it is imported."""

    def __init__(self, parent: PlaceholderModule) -> None:
        self.parent = parent

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{self.parent.__name__}."):
            return None
        self.parent.load()
        module = import_module(fullname)
        del sys.modules[fullname]  # otherwise importlib executes a module again that appeared during the search
        return ModuleSpec(fullname, _ImportedModule(module))


class _ImportedModule(Loader):
    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        with suppress(AttributeError):  # torch's configuration modules have a fixed set of attributes
            module.__spec__ = self._spec
