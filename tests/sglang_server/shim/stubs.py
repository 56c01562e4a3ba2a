"""Stand-ins for packages that SGLang imports everywhere and calls only on an accelerator.

`fill(name)` makes the module `name` a package in which every import succeeds: whatever is asked of it is a `Stub`. A stub can be made,
called and used as a decorator, since modules do so while they are imported. A kernel that was decorated raises when it is launched.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types


class Stub:
    """Any name of an absent package."""

    def __init__(self, name: str = "stub", *_, **__):
        self._name = str(name)

    def __getattr__(self, name: str) -> Stub:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub(f"{self._name}.{name}")

    def __call__(self, *args, **kwargs) -> Stub:
        """A decorator, with arguments or without; the names of constants and configurations are of no use here."""
        return Stub(getattr(args[0], "__qualname__", self._name) if args else self._name)

    def __getitem__(self, grid):
        raise NotImplementedError(f"{self._name} is a kernel for accelerators; this server runs on a CPU")

    def __mro_entries__(self, bases) -> tuple[type, ...]:
        return (object,)  # a class may name a stub as its base


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Stub:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub(f"{self.__name__}.{name}")


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, package: str):
        self.package = package

    def find_spec(self, fullname, path=None, target=None):
        if fullname.startswith(f"{self.package}."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module) -> None:
        pass


def fill(name: str) -> None:
    """Gives the module `name`, which is being imported, every attribute and every submodule."""
    module = sys.modules[name]
    module.__class__, module.__path__ = _Module, []
    sys.meta_path.append(_Submodules(name))
